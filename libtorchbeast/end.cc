#include "end.h"

#include <iterator>
#include <new>

#include "batching.h"
#include "text.h"

namespace torchbeast {

const char kRunIsComplete[] = "is no longer needed: the run is complete";

namespace {

const char kOverText[] = "this learner is about to end";

using Code = grpc::StatusCode;
// By End::Kind.
constexpr Code kCodes[] = {
    Code::OK,                   // kLeft
    Code::UNAVAILABLE,          // kLost
    Code::UNAVAILABLE,          // kOver
    Code::OK,                   // kFinished
    Code::OK,                   // kRaised
    Code::ABORTED,              // kFailed
    Code::FAILED_PRECONDITION,  // kRefused
    Code::UNAUTHENTICATED,      // kStranger
    Code::INVALID_ARGUMENT,     // kBrokeRules
    Code::FAILED_PRECONDITION,  // kUnusable
    Code::RESOURCE_EXHAUSTED,   // kBusy
    Code::RESOURCE_EXHAUSTED,   // kNoMemory
};
static_assert(std::size(kCodes) == End::kNoMemory + 1);

}  // namespace

void throw_over() { throw Ended(End::kOver, kOverText); }

End end_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Ended& ended) {
    return {ended.kind, ended.what(), error};
  } catch (const ClosedBatchingQueue&) {
    return {End::kOver, kOverText, error};
  } catch (const std::bad_alloc&) {
    return {End::kNoMemory, "the system refuses memory", error};
  } catch (const std::exception& failed) {
    return {End::kFailed, failed.what(), error};
  } catch (...) {
    return {End::kFailed, "something was thrown that is no error", error};
  }
}

grpc::Status to_status(const End& end) {
  const Code code = kCodes[end.kind];
  if (code == Code::OK) return grpc::Status::OK;
  // gRPC takes up to 8 KiB of headers, in which a byte of the text may become three.
  return {code, shortened(end.text, 2500)};
}

End::Kind meaning_of(grpc::StatusCode code) {
  switch (code) {
    case Code::INVALID_ARGUMENT:
    case Code::FAILED_PRECONDITION:
    case Code::UNAUTHENTICATED:
    case Code::PERMISSION_DENIED:
    case Code::UNIMPLEMENTED:
      return End::kRefused;
    default:
      return End::kLost;
  }
}

}  // namespace torchbeast
