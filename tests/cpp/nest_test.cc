#include "nest/nest.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using nest::Nest;
using nest::StructureError;

using Ints = Nest<int>;
using Vector = Ints::Vector;
using Map = Ints::Map;

// {"b": 3, "a": [1, {"x": 2}], "c": []}: the keys are not given in order.
Ints example() {
  return Map{{"b", 3}, {"a", Vector{1, Map{{"x", 2}}}}, {"c", Vector{}}};
}

// Structures without any leaf.
std::vector<Ints> empty_nests() {
  return {Ints(), Ints(Vector{}), Ints(Map{}), Ints(Vector{Map{}, Vector{}}),
          Ints(Map{{"a", Vector{}}, {"b", Map{}}})};
}

// The text of the StructureError that f() throws.
template <typename F>
std::string error_of(F f) {
  try {
    f();
  } catch (const StructureError& error) {
    return error.what();
  }
  return "no error";
}

template <typename A, typename B>
void check_same_structure(const Nest<A>& a, const Nest<B>& b) {
  nest::for_each2([](const A&, const B&) {}, a, b);
}

TEST(Nest, KnowsItsKind) {
  const Ints leaf = 5;
  EXPECT_TRUE(leaf.is_leaf() && !leaf.is_vector() && !leaf.is_map());
  EXPECT_EQ(leaf.leaf(), 5);

  const Ints vector = Vector{1, 2};
  EXPECT_TRUE(!vector.is_leaf() && vector.is_vector() && !vector.is_map());
  EXPECT_EQ(vector.vector().size(), 2u);

  const Ints map = Map{{"a", 1}};
  EXPECT_TRUE(!map.is_leaf() && !map.is_vector() && map.is_map());
  EXPECT_EQ(map.dict().at("a").leaf(), 1);

  EXPECT_TRUE(Ints().is_vector());
}

TEST(Nest, AccessToAnotherKindIsAnError) {
  EXPECT_EQ(error_of([] {
              Ints(Vector{1, 2}).leaf();
            }),
            "expected a leaf, not a vector of 2");
  EXPECT_EQ(error_of([] { Ints(5).vector(); }), "expected a vector, not a leaf");
  EXPECT_EQ(error_of([] { Ints(5).dict(); }), "expected a dict, not a leaf");
  EXPECT_EQ(error_of([] {
              Ints(Map{{"a", 1}}).vector();
            }),
            "expected a vector, not a dict of 1");
}

TEST(Nest, AccessorsCanChangeIt) {
  Ints n = Vector{1, Map{{"a", 2}}};
  n.vector()[0].leaf() = 10;
  n.vector()[1].dict()["b"] = 30;
  EXPECT_EQ(n, Ints(Vector{10, Map{{"a", 2}, {"b", 30}}}));
  EXPECT_NE(n, Ints(Vector{10, Map{{"a", 2}, {"c", 30}}}));
}

TEST(Nest, VisitsMapsInKeyOrder) {
  EXPECT_EQ(example().flatten(), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(example().num_leaves(), 3u);
  EXPECT_EQ(example().front(), 1);
  std::vector<int> visited;
  example().for_each([&](int leaf) { visited.push_back(leaf); });
  EXPECT_EQ(visited, (std::vector<int>{1, 2, 3}));
}

TEST(Nest, ForEachCanChangeLeaves) {
  Ints n = example();
  n.for_each([](int& leaf) { leaf *= 10; });
  EXPECT_EQ(n.flatten(), (std::vector<int>{10, 20, 30}));
}

TEST(Nest, MapKeepsTheStructureAndChangesTheType) {
  using Strings = Nest<std::string>;
  const Ints n = example();
  const Strings result = n.map([](int leaf) { return std::to_string(leaf); });
  const Strings expected = Strings::Map{
      {"a", Strings::Vector{std::string("1"), Strings::Map{{"x", std::string("2")}}}},
      {"b", std::string("3")},
      {"c", Strings::Vector{}}};
  EXPECT_EQ(result, expected);
}

TEST(Nest, MapOfAReferenceReturnedIsACopy) {
  Ints n = Vector{1, 2};
  auto identity = [](const int& leaf) -> const int& { return leaf; };
  static_assert(std::is_same_v<decltype(n.map(identity)), Ints>);
  EXPECT_EQ(n.map(identity), n);
}

TEST(Nest, BoolLeaves) {  // std::vector<bool> has no real references
  const Nest<bool> odd = example().map([](int leaf) { return leaf % 2 == 1; });
  EXPECT_EQ(odd.flatten(), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(nest::pack_as(example(), odd.flatten()), odd);
  EXPECT_EQ(nest::zip<bool>({odd, odd}).front(), (std::vector<bool>{true, true}));
}

TEST(Nest, EmptyStructures) {
  for (const Ints& n : empty_nests()) {
    EXPECT_TRUE(n.empty());
    EXPECT_EQ(n.num_leaves(), 0u);
    EXPECT_TRUE(n.flatten().empty());
    EXPECT_EQ(error_of([&] { n.front(); }), "front() of a nest without leaves");
    EXPECT_EQ(n.map([](int leaf) { return leaf; }), n);
    EXPECT_EQ(Ints(n).map([](int leaf) { return leaf; }), n);
    EXPECT_EQ(nest::pack_as(n, std::vector<int>{}), n);
    EXPECT_TRUE(nest::zip<int>({n, n}).empty());
    check_same_structure(n, n);
  }
  EXPECT_FALSE(Ints(5).empty());
}

TEST(Nest, FrontSkipsEmptySubstructures) {
  const Ints n = Vector{Vector{}, Map{{"a", Vector{Map{}}}, {"b", 7}}, 8};
  EXPECT_EQ(n.front(), 7);
  EXPECT_EQ(&n.front(), &n.vector()[1].dict().at("b").leaf());
  EXPECT_FALSE(n.empty());
}

TEST(Nest, MoveOnlyLeaves) {
  using Pointers = Nest<std::unique_ptr<int>>;
  static_assert(std::is_nothrow_move_constructible_v<Pointers>);
  auto make = [](int leaf) { return std::make_unique<int>(leaf); };

  Pointers pointers = example().map(make);
  const int* first = pointers.front().get();
  EXPECT_EQ(pointers.map([](const auto& p) { return *p; }), example());

  // Through the && versions the leaves move, they are not made anew.
  Pointers moved = std::move(pointers).map(
      [](std::unique_ptr<int> p) { return std::unique_ptr<int>(std::move(p)); });
  EXPECT_EQ(moved.front().get(), first);
  std::vector<std::unique_ptr<int>> leaves = std::move(moved).flatten();
  ASSERT_EQ(leaves.size(), 3u);
  EXPECT_EQ(leaves[0].get(), first);
  Pointers packed = nest::pack_as(example(), std::move(leaves));
  EXPECT_EQ(packed.front().get(), first);

  std::vector<Pointers> all;
  all.push_back(std::move(packed));
  all.push_back(example().map(make));
  EXPECT_EQ(nest::zip(std::move(all)).front()[0].get(), first);
}

TEST(Nest, ConstVersionsCopy) {
  using Strings = Nest<std::string>;
  const std::string text(100, 'x');
  Strings n = Strings::Vector{text, text};
  EXPECT_EQ(n.flatten()[1], text);
  EXPECT_EQ(n.map([](std::string leaf) { return leaf; }), n);
  EXPECT_EQ(n.flatten()[1], text);
}

TEST(PackAs, IsTheInverseOfFlatten) {
  EXPECT_EQ(nest::pack_as(example(), example().flatten()), example());
  EXPECT_EQ(nest::pack_as(Ints(1), std::vector<int>{9}), Ints(9));
}

TEST(PackAs, AnotherCountIsAnErrorWithBoth) {
  auto pack = [](std::vector<int> leaves) {
    return error_of([&] { nest::pack_as(example(), leaves); });
  };
  EXPECT_EQ(pack({1, 2}), "the structure has 3 leaves, 2 were given");
  EXPECT_EQ(pack({1, 2, 3, 4}), "the structure has 3 leaves, 4 were given");
  EXPECT_EQ(pack({}), "the structure has 3 leaves, 0 were given");
}

TEST(ForEach2, PairsLeaves) {
  const Ints n = example().map([](int x) { return 101 * x; });
  int sum = 0;
  nest::for_each2([&](int x, int y) { sum += x * y; }, example(), n);
  EXPECT_EQ(sum, 101 + 2 * 202 + 3 * 303);
}

TEST(Zip, GathersLeavesInOrder) {
  const Ints two = example().map([](int x) { return 10 * x; });
  const Ints three = example().map([](int x) { return 100 * x; });
  const auto zipped = nest::zip<int>({example(), two, three});
  check_same_structure(zipped, example());
  EXPECT_EQ(zipped.flatten(),
            (std::vector<std::vector<int>>{{1, 10, 100}, {2, 20, 200}, {3, 30, 300}}));
}

TEST(Zip, Errors) {
  EXPECT_EQ(error_of([] { nest::zip(std::vector<Ints>{}); }), "zip() of no nests");
  EXPECT_EQ(error_of([] {
              nest::zip<int>({Vector{1}, Vector{2}, Vector{}});
            }),
            "at the root: a vector of 1 in the first, a vector of 0 in number "
            "3");
}

TEST(ForEach2, NamesThePlaceAndTheDifference) {
  auto difference = [](const Ints& a, const Ints& b) {
    return error_of([&] { check_same_structure(a, b); });
  };
  EXPECT_EQ(difference(example(), example()), "no error");
  EXPECT_EQ(difference(1, Vector{}),
            "at the root: a leaf in the first, a vector of 0 in the second");
  EXPECT_EQ(difference(Map{}, Vector{}),
            "at the root: a dict of 0 in the first, a vector of 0 in the "
            "second");
  EXPECT_EQ(difference(Vector{Map{{"reward", 1}}, 2},
                       Vector{Map{{"reward", Vector{1, 2}}}, 2}),
            "at [0][\"reward\"]: a leaf in the first, a vector of 2 in the second");
  EXPECT_EQ(difference(Vector{1, Vector{2, 3}}, Vector{1, Vector{2}}),
            "at [1]: a vector of 2 in the first, a vector of 1 in the second");
  EXPECT_EQ(difference(Vector{1}, Vector{1, 2}),
            "at the root: a vector of 1 in the first, a vector of 2 in the "
            "second");
}

TEST(ForEach2, NamesTheKeys) {
  auto difference = [](const Ints& a, const Ints& b) {
    return error_of([&] { check_same_structure(a, b); });
  };
  const Ints n = Map{{"a", 1}, {"b", 2}, {"c", 3}};
  EXPECT_EQ(difference(n, Map{{"c", 3}}),
            "at the root: only the first has \"a\", \"b\"");
  EXPECT_EQ(difference(Map{{"c", 3}}, n),
            "at the root: only the second has \"a\", \"b\"");
  EXPECT_EQ(difference(Vector{n}, Vector{Map{{"a", 1}, {"b", 2}, {"x", 3}}}),
            "at [0]: only the first has \"c\"; only the second has \"x\"");
  EXPECT_EQ(difference(Map{{"say \"x\"", 1}}, Map{{"say \"x\"", Map{}}}),
            "at [\"say \\\"x\\\"\"]: a leaf in the first, a dict of 0 in the "
            "second");
}

TEST(Place, PrintsThePath) {
  const nest::Place root;
  const std::string key = "a";
  const nest::Place first(root, 0);
  const nest::Place second(first, key);
  const nest::Place third(second, 12);
  EXPECT_EQ(root.str(), "the root");
  EXPECT_EQ(third.str(), "[0][\"a\"][12]");
  EXPECT_EQ(root.depth(), 0u);
  EXPECT_EQ(third.depth(), 3u);
}

}  // namespace
