#include "commands.h"

#include "copies.h"
#include "launch.h"
#include "status.h"

namespace {

void copy(const uint64_t (*rows)[3], int64_t count, cudaStream_t stream, bool force_loop) {
    plan::Copies copies = plan::split(rows, count);
    submit_copies(copies, stream, force_loop);
}

void move(uint64_t table, int64_t count, cudaStream_t stream) {
    if (!plan::checked_move(pointer<void>(table), count)) return;
    launch_move(pointer<const moving::Move>(table), static_cast<int>(count), stream);
}

void digest(uint64_t table, int64_t count, uint64_t length, uint64_t digests, cudaStream_t stream) {
    if (!plan::checked_digest(pointer<void>(table), count, length, pointer<void>(digests))) return;
    launch_digest(pointer<const digesting::Run>(table), static_cast<int>(count), length,
                  pointer<unsigned long long>(digests), stream);
}

}  // namespace

void submit_command(const uint64_t row[kCommandWords], bool force_loop) {
    const auto [number, stream_handle, a, b, c, d] = *reinterpret_cast<const uint64_t(*)[kCommandWords]>(row);
    const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
    switch (static_cast<Command>(number)) {
        case Command::record: CHECK(cudaEventRecord(pointer<CUevent_st>(a), stream)); return;
        case Command::wait: CHECK(cudaStreamWaitEvent(stream, pointer<CUevent_st>(a), 0)); return;
        case Command::copy: copy(pointer<const uint64_t[3]>(a), static_cast<int64_t>(b), stream, force_loop); return;
        case Command::move: move(a, static_cast<int64_t>(b), stream); return;
        case Command::digest: digest(a, static_cast<int64_t>(b), c, d, stream); return;
    }
    throw std::invalid_argument("no command has the number " + std::to_string(number));
}
