// Nested structures of leaves, such as an observation made of dicts and tuples.
//
//   using nest::Nest;
//   Nest<int> n(Nest<int>::Map{{"a", 1}, {"b", Nest<int>::Vector{2, 3}}});
//   n.flatten();                              // 1, 2, 3
//   n.map([](int x) { return x / 2.0; });     // Nest<double>, same structure
//
// Walks visit the leaves of a vector by index and the leaves of a map by key. Every
// walk recurses, so code that builds a nest from foreign data must bound its depth.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iomanip>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace nest {

// A nest has the wrong structure. In Python this is a ValueError.
class StructureError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The current position of a walk in a structure. It is a chain of steps on the
// walk's stack, so it costs almost nothing until an error prints it.
// REQUIRES: the parent and the key outlive the Place.
class Place {
 public:
  Place() = default;  // the root
  Place(const Place& parent, size_t index)
      : parent_(&parent), index_(index), depth_(parent.depth_ + 1) {}
  Place(const Place& parent, const std::string& key)
      : parent_(&parent), key_(&key), depth_(parent.depth_ + 1) {}

  // The number of steps from the root.
  size_t depth() const { return depth_; }

  // As in `[0]["reward"]`, or `the root`.
  std::string str() const {
    if (parent_ == nullptr) return "the root";
    std::ostringstream text;
    if (parent_->parent_ != nullptr) text << parent_->str();
    text << '[';
    if (key_ != nullptr) {
      text << std::quoted(*key_);
    } else {
      text << index_;
    }
    text << ']';
    return text.str();
  }

 private:
  const Place* parent_ = nullptr;
  const std::string* key_ = nullptr;  // null for an index
  size_t index_ = 0;
  size_t depth_ = 0;
};

namespace internal {

// f(leaves...), or f(leaves..., place) if it takes that.
template <typename F, typename... Leaves>
void call_at(const Place& place, F& f, Leaves&... leaves) {
  if constexpr (std::is_invocable_v<F&, Leaves&..., const Place&>) {
    f(leaves..., place);
  } else {
    f(leaves...);
  }
}

}  // namespace internal

// A leaf of type T, a vector of nests, or a map from names to nests.
//
// T may be a move-only type; functions that copy leaves then don't compile.
template <typename T>
class Nest {
 public:
  using Vector = std::vector<Nest>;
  using Map = std::map<std::string, Nest>;

  Nest() : value_(std::in_place_index<1>) {}  // an empty vector
  Nest(T leaf) : value_(std::in_place_index<0>, std::move(leaf)) {}
  Nest(Vector vector) : value_(std::in_place_index<1>, std::move(vector)) {}
  Nest(Map map) : value_(std::in_place_index<2>, std::move(map)) {}

  bool is_leaf() const { return value_.index() == 0; }
  bool is_vector() const { return value_.index() == 1; }
  bool is_map() const { return value_.index() == 2; }

  // The content. Throws StructureError if the nest is of another kind.
  const T& leaf() const& { return get<0>(*this, "a leaf"); }
  T& leaf() & { return get<0>(*this, "a leaf"); }
  const Vector& vector() const& { return get<1>(*this, "a vector"); }
  Vector& vector() & { return get<1>(*this, "a vector"); }
  const Map& dict() const& { return get<2>(*this, "a dict"); }
  Map& dict() & { return get<2>(*this, "a dict"); }

  // Calls f(leaf) or f(leaf, place) for every leaf. In a nest that is not const, f may
  // change it.
  template <typename F>
  void for_each(F&& f) const& {
    walk(*this, f, Place());
  }
  template <typename F>
  void for_each(F&& f) & {
    walk(*this, f, Place());
  }

  // The nest of the results of f(leaf). std::move(nest).map(f) moves the leaves
  // into f.
  template <typename F>
  auto map(F&& f) const& {
    using R = std::decay_t<std::invoke_result_t<F&, const T&>>;
    return map_leaves<R>(*this, f);
  }
  template <typename F>
  auto map(F&& f) && {
    using R = std::decay_t<std::invoke_result_t<F&, T&&>>;
    auto move_into_f = [&f](T& leaf) -> R { return f(std::move(leaf)); };
    return map_leaves<R>(*this, move_into_f);
  }

  // The leaves in order. std::move(nest).flatten() moves them.
  std::vector<T> flatten() const& {
    std::vector<T> leaves;
    for_each([&leaves](const T& leaf) { leaves.push_back(leaf); });
    return leaves;
  }
  std::vector<T> flatten() && {
    std::vector<T> leaves;
    for_each([&leaves](T& leaf) { leaves.push_back(std::move(leaf)); });
    return leaves;
  }

  // The first leaf. Throws StructureError if there is none.
  const T& front() const& {
    const T* leaf = find_first();
    if (leaf == nullptr) throw StructureError("front() of a nest without leaves");
    return *leaf;
  }

  // Whether there is no leaf. A vector of empty nests is also empty.
  bool empty() const { return find_first() == nullptr; }

  size_t num_leaves() const {
    size_t count = 0;
    for_each([&count](const T&) { ++count; });
    return count;
  }

  // As in `a vector of 2`, for errors.
  std::string describe() const {
    if (is_leaf()) return "a leaf";
    if (is_vector()) return "a vector of " + std::to_string(vector().size());
    return "a dict of " + std::to_string(dict().size());
  }

  friend bool operator==(const Nest& a, const Nest& b) { return a.value_ == b.value_; }
  friend bool operator!=(const Nest& a, const Nest& b) { return !(a == b); }

 private:
  // Below, Self is Nest or const Nest.

  template <size_t kind, typename Self>
  static auto& get(Self& self, const char* wanted) {
    auto* value = std::get_if<kind>(&self.value_);
    if (value == nullptr) {
      throw StructureError(std::string("expected ") + wanted + ", not " +
                           self.describe());
    }
    return *value;
  }

  template <typename Self, typename F>
  static void walk(Self& self, F& f, const Place& place) {
    if (self.is_leaf()) {
      internal::call_at(place, f, self.leaf());
    } else if (self.is_vector()) {
      size_t i = 0;
      for (auto& child : self.vector()) walk(child, f, Place(place, i++));
    } else {
      for (auto& [key, child] : self.dict()) walk(child, f, Place(place, key));
    }
  }

  template <typename R, typename Self, typename F>
  static Nest<R> map_leaves(Self& self, F& f) {
    if (self.is_leaf()) return Nest<R>(f(self.leaf()));
    if (self.is_vector()) {
      typename Nest<R>::Vector results;
      results.reserve(self.vector().size());
      for (auto& child : self.vector()) {
        results.push_back(map_leaves<R>(child, f));
      }
      return Nest<R>(std::move(results));
    }
    typename Nest<R>::Map results;
    for (auto& [key, child] : self.dict()) {
      results.emplace_hint(results.end(), key, map_leaves<R>(child, f));
    }
    return Nest<R>(std::move(results));
  }

  const T* find_first() const {
    if (is_leaf()) return &leaf();
    if (is_vector()) {
      for (const Nest& child : vector()) {
        if (const T* leaf = child.find_first()) return leaf;
      }
    } else {
      for (const auto& item : dict()) {
        if (const T* leaf = item.second.find_first()) return leaf;
      }
    }
    return nullptr;
  }

  std::variant<T, Vector, Map> value_;
};

namespace internal {

// The keys of `a` that `b` lacks, as in `"x", "y"`.
template <typename MapA, typename MapB>
std::string missing_keys(const MapA& a, const MapB& b) {
  std::ostringstream keys;
  const char* separator = "";
  for (const auto& item : a) {
    if (b.count(item.first) > 0) continue;
    keys << separator << std::quoted(item.first);
    separator = ", ";
  }
  return keys.str();
}

// Text on how two nests differ. `number` is the position of b, counted from 1.
template <typename A, typename B>
std::string describe_difference(const Nest<A>& a, const Nest<B>& b, size_t number) {
  const std::string name =
      number == 2 ? "the second" : "number " + std::to_string(number);
  if (!a.is_map() || !b.is_map()) {
    return a.describe() + " in the first, " + b.describe() + " in " + name;
  }
  const std::string only_a = missing_keys(a.dict(), b.dict());
  const std::string only_b = missing_keys(b.dict(), a.dict());
  std::string text;
  if (!only_a.empty()) text += "only the first has " + only_a;
  if (!only_a.empty() && !only_b.empty()) text += "; ";
  if (!only_b.empty()) text += "only " + name + " has " + only_b;
  return text;
}

// Calls f for every pair of leaves. `number` is the position of b.
template <typename F, typename A, typename B>
void walk2(F& f, const Nest<A>& a, const Nest<B>& b, size_t number,
           const Place& place) {
  auto same_key = [](const auto& x, const auto& y) { return x.first == y.first; };
  if (a.is_leaf() && b.is_leaf()) {
    call_at(place, f, a.leaf(), b.leaf());
  } else if (a.is_vector() && b.is_vector() && a.vector().size() == b.vector().size()) {
    for (size_t i = 0; i < a.vector().size(); ++i) {
      walk2(f, a.vector()[i], b.vector()[i], number, Place(place, i));
    }
  } else if (a.is_map() && b.is_map() &&
             std::equal(a.dict().begin(), a.dict().end(), b.dict().begin(),
                        b.dict().end(), same_key)) {
    auto other = b.dict().begin();
    for (const auto& [key, child] : a.dict()) {
      walk2(f, child, other->second, number, Place(place, key));
      ++other;
    }
  } else {
    throw StructureError("at " + place.str() + ": " +
                         describe_difference(a, b, number));
  }
}

}  // namespace internal

// A nest with the structure of another nest, into which `leaves` are moved. Throws
// StructureError if the number of leaves differs.
template <typename U, typename T>
Nest<T> pack_as(const Nest<U>& structure, std::vector<T> leaves) {
  const size_t needed = structure.num_leaves();
  if (leaves.size() != needed) {
    throw StructureError("the structure has " + std::to_string(needed) + " leaves, " +
                         std::to_string(leaves.size()) + " were given");
  }
  auto next = leaves.begin();
  return structure.map([&next](const U&) -> T { return std::move(*next++); });
}

// Calls f(leaf of a, leaf of b), or with the place behind them, for every pair. Throws
// StructureError at the first place where the structures differ, which it names, as in
// `at [0]["reward"]: a leaf in the first, a vector of 2 in the second`.
template <typename F, typename A, typename B>
void for_each2(F&& f, const Nest<A>& a, const Nest<B>& b) {
  internal::walk2(f, a, b, 2, Place());
}

// One nest whose leaves are vectors of the leaves of several nests: [x0, x1,
// ...] with x0 moved from the first nest, x1 from the second. Throws StructureError
// if there is no nest, or if a nest differs in structure from the first.
template <typename T>
Nest<std::vector<T>> zip(std::vector<Nest<T>> nests) {
  if (nests.empty()) throw StructureError("zip() of no nests");
  auto nothing = [](const T&, const T&) {};
  for (size_t i = 1; i < nests.size(); ++i) {
    internal::walk2(nothing, nests[0], nests[i], i + 1, Place());
  }
  std::vector<std::vector<T>> columns(nests[0].num_leaves());
  for (std::vector<T>& column : columns) column.reserve(nests.size());
  for (Nest<T>& nest : nests) {
    auto column = columns.begin();
    nest.for_each([&column](T& leaf) { (column++)->push_back(std::move(leaf)); });
  }
  // The leaves have moved out of the first nest, but its structure remains.
  return pack_as(nests[0], std::move(columns));
}

}  // namespace nest
