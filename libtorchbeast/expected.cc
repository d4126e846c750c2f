#include "expected.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>

#include "text.h"
#include "transport.h"

namespace torchbeast {

using google::protobuf::util::MessageDifferencer;

namespace {

// What in `hello` is not as expected; empty if nothing is.
std::string unexpected(const ExpectedEnvironment& expected,
                       const wire::EnvHello& hello) {
  std::map<std::string, std::string> ours = expected.settings, theirs;
  for (const wire::Setting& setting : hello.settings()) {
    theirs.emplace(setting.name(), setting.value());
  }
  if (ours.empty() || theirs.empty()) ours = theirs = {};
  // The hello also says these two, without settings.
  if (!expected.name.empty() && !hello.environment().empty()) {
    ours["env"] = expected.name;
    theirs["env"] = hello.environment();
  }
  if (expected.num_envs > 0) {
    ours["envs_per_actor"] = std::to_string(expected.num_envs);
    theirs["envs_per_actor"] = std::to_string(hello.num_envs());
  }
  // Which flags there are depends on the environment.
  const bool same_env =
      ours.count("env") + theirs.count("env") < 2 || ours["env"] == theirs["env"];
  std::string text;
  const auto add = [&text](const std::string& theirs, const std::string& ours) {
    text += (text.empty() ? "" : ", ") + theirs + " (this learner: " + ours + ")";
  };
  for (const auto& [flag, value] : ours) {
    const auto found = theirs.find(flag);
    if (found == theirs.end()) {
      if (same_env) add("no --" + flag, value);
    } else if (found->second != value) {
      add("--" + flag + " " + found->second, value);
    }
  }
  for (const auto& [flag, value] : theirs) {
    if (same_env && ours.count(flag) == 0)
      add("--" + flag + " " + value, "no such flag");
  }
  return text;
}

}  // namespace

void ExpectedEnvironment::check(const wire::EnvHello& hello,
                                const std::string& peer) const {
  const std::string text = unexpected(*this, hello);
  if (!text.empty()) {
    throw RefusedError(peer + " has " + shortened(text, 2000) +
                       "; give both sides the same flags");
  }
}

// --- Hellos

namespace {

// The hello without what each stream has for itself.
wire::EnvHello common_part(wire::EnvHello hello, bool with_name) {
  hello.clear_settings();
  hello.clear_stream_id();
  hello.clear_first_step();
  if (!with_name) hello.clear_environment();
  return hello;
}

}  // namespace

KnownHello::KnownHello(wire::EnvHello hello, std::string peer)
    : hello_(std::move(hello)),
      peer_(std::move(peer)),
      common_(common_part(hello_, false).SerializeAsString()) {}

bool KnownHello::have_names(const KnownHello& other) const {
  return !hello_.environment().empty() && !other.hello_.environment().empty();
}

bool KnownHello::is_alike(const KnownHello& other) const {
  return common_ == other.common_ &&
         (!have_names(other) || hello_.environment() == other.hello_.environment());
}

std::string KnownHello::difference(const KnownHello& first) const {
  const bool with_name = have_names(first);
  // About two large hellos there may be megabytes to say: what does not fit is left
  // out.
  std::string text(2000, '\0');
  google::protobuf::io::ArrayOutputStream out(text.data(),
                                              static_cast<int>(text.size()));
  {
    MessageDifferencer differencer;
    MessageDifferencer::StreamReporter reporter(&out);
    differencer.ReportDifferencesTo(&reporter);
    differencer.Compare(common_part(first.hello_, with_name),
                        common_part(hello_, with_name));
  }
  const auto size = static_cast<size_t>(out.ByteCount());
  const bool is_whole = size < text.size();
  text = first_bytes(text, size);
  if (is_whole && size > 0) text.pop_back();  // the last end of a line
  std::replace(text.begin(), text.end(), '\n', ';');
  return peer_ + " differs from " + first.peer_ +
         ", and the environments of one run must not: " + text +
         (is_whole ? "" : " [...]");
}

void HelloCheck::check(const wire::EnvHello& hello, const std::string& peer,
                       bool has_joined) {
  expected_.check(hello, peer);
  const auto own = std::make_shared<const KnownHello>(hello, peer);
  std::shared_ptr<const KnownHello> first;
  {
    MutexLock lock(mutex_);
    if (!first_) first_ = own;
    first = first_;
    if (own->is_alike(*first)) {
      // The name may be left out, also by the first.
      if (first->hello().environment().empty()) first_ = own;
      return;
    }
  }
  const std::string text = own->difference(*first);
  if (!has_joined || is_settled_) throw RefusedError(text);
  ++num_different_;
  throw Ended(End::kBusy, text + "; it may try again later");
}

}  // namespace torchbeast
