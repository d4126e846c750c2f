#include "expected.h"

#include "transport.h"

namespace torchbeast {

namespace {

// The one setting that the hello says twice.
constexpr char kEnv[] = "env";

// What is different in `hello`; empty if nothing is.
std::string differences(const ExpectedEnvironment& expected,
                        const wire::EnvHello& hello) {
  const auto& [name, num_envs, settings] = expected;
  std::string text;
  const auto add = [&text](const std::string& what) {
    if (!text.empty()) text += ", ";
    text += what;
  };
  const auto differs = [&add](const std::string& flag, const std::string& theirs,
                              const std::string& ours) {
    add("--" + flag + " " + theirs + " (this learner: " + ours + ")");
  };
  const bool same_name =
      name.empty() || hello.environment().empty() || hello.environment() == name;
  if (!same_name) differs(kEnv, hello.environment(), name);
  const auto E = static_cast<int64_t>(hello.num_envs());
  if (num_envs > 0 && E != num_envs) {
    differs("envs_per_actor", std::to_string(E), std::to_string(num_envs));
  }
  if (settings.empty() || hello.settings().empty()) return text;
  std::map<std::string, std::string> theirs;
  for (const wire::Setting& setting : hello.settings()) {
    theirs.emplace(setting.name(), setting.value());
  }
  for (const auto& [flag, value] : settings) {
    const auto found = theirs.find(flag);
    if (found == theirs.end()) {
      // Which flags matter depends on the environment.
      if (same_name) add("no --" + flag + " (this learner: " + value + ")");
    } else if (found->second != value && (flag != kEnv || same_name)) {
      differs(flag, found->second, value);
    }
  }
  for (const auto& [flag, value] : theirs) {
    if (same_name && settings.count(flag) == 0) {
      add("--" + flag + " " + value + " (this learner: no such flag)");
    }
  }
  return text;
}

}  // namespace

void ExpectedEnvironment::check(const wire::EnvHello& hello,
                                const std::string& peer) const {
  const std::string text = differences(*this, hello);
  if (!text.empty()) {
    throw RefusedError(peer + " has " + text + "; give both sides the same flags");
  }
}

}  // namespace torchbeast
