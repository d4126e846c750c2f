#include "end.h"

#include <new>

#include "batching.h"
#include "text.h"

namespace torchbeast {

const char kRunIsComplete[] = "is no longer needed: the run is complete";

namespace {

const char kOverText[] = "this learner is about to end";

grpc::StatusCode code_of(End::Kind kind) {
  switch (kind) {
    case End::kLeft:
    case End::kFinished:
    case End::kRaised:
      return grpc::StatusCode::OK;
    case End::kLost:
    case End::kOver:
      return grpc::StatusCode::UNAVAILABLE;
    case End::kBusy:
    case End::kNoMemory:
      return grpc::StatusCode::RESOURCE_EXHAUSTED;
    case End::kRefused:
    case End::kUnusable:
      return grpc::StatusCode::FAILED_PRECONDITION;
    case End::kStranger:
      return grpc::StatusCode::UNAUTHENTICATED;
    case End::kBrokeRules:
      return grpc::StatusCode::INVALID_ARGUMENT;
    case End::kFailed:
      return grpc::StatusCode::ABORTED;
  }
  return grpc::StatusCode::UNKNOWN;
}

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
  const grpc::StatusCode code = code_of(end.kind);
  if (code == grpc::StatusCode::OK) return grpc::Status::OK;
  // gRPC takes up to 8 KiB of headers, in which a byte of the text may become three.
  return {code, shortened(end.text, 2500)};
}

End::Kind meaning_of(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNIMPLEMENTED:
      return End::kRefused;
    default:
      return End::kLost;
  }
}

}  // namespace torchbeast
