// A block's threads on a CPU. Each is a coroutine, which runs until it comes to a barrier or to a
// shuffle. Blocks run one after the other, in any order. What CUDA leaves undefined is a fault here:
//     threads of a block wait at different barriers, or have returned while others wait
//     a lane takes part in a shuffle that another lane of its warp hasn't come to
//     a shuffle's mask leaves lanes out
//     a thread writes past the shared memory that the launch asked for
// Shared memory holds NaN when a block begins. Between two barriers each warp runs as far as it can
// before the next one begins, in an order that can be chosen. So what one warp reads before another
// has written it is NaN, or depends on the order.
// Compiled without _FORTIFY_SOURCE, whose longjmp doesn't leave a stack.

#include "device.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

dim3 threadIdx, blockIdx, gridDim;
int warpSize = 32;
constexpr int SHARED_WORDS = 12 * 1024;              // the 48 KB that every CUDA device has
constexpr uint32_t POISON = 0xffc0dead;              // NaN, and as an int it is negative
alignas(16) float shared_memory[SHARED_WORDS + 64];  // the last 64 words are nobody's

namespace {

enum State { READY, AT_BARRIER, AT_SHUFFLE, RETURNED };

struct Thread {
    State state;
    int line;  // where it waits
    float value;
    int lanes;
    jmp_buf place;
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    static constexpr size_t STACK = 64 * 1024;
};

std::vector<Thread> threads;
const std::function<void()> *body;
int current;
unsigned order;  // 0: from the first thread to the last; 1: backwards; else: shuffled by this seed
jmp_buf scheduler;
ucontext_t beginning;
std::string fault;

void fail(const std::string &what)
{
    if (fault.empty()) fault = what;
}

void begin()
{
    (*body)();
    threads[current].state = RETURNED;
    _longjmp(scheduler, 1);
}

void wait(State state, int line)
{
    Thread &own = threads[current];
    own.state = state;
    own.line = line;
    if (!_setjmp(own.place)) _longjmp(scheduler, 1);
}

void resume(int number, bool is_new)
{
    current = number;
    threadIdx = dim3(number);
    if (_setjmp(scheduler)) return;
    if (!is_new) _longjmp(threads[number].place, 1);
    ucontext_t &context = threads[number].context;
    getcontext(&context);
    context.uc_stack.ss_sp = threads[number].stack.get();
    context.uc_stack.ss_size = Thread::STACK;
    context.uc_link = nullptr;
    makecontext(&context, begin, 0);
    swapcontext(&beginning, &context);
}

// Whether all of threads [first, end) wait in this state, at one line; a fault if only some do.
bool all_wait(int first, int end, State state, const char *where)
{
    const int line = threads[first].line;
    const auto waits = [&](const Thread &t) { return t.state == state; };
    const auto begins = threads.begin() + first, ends = threads.begin() + end;
    if (std::none_of(begins, ends, waits)) return false;
    for (auto thread = begins; thread != ends; ++thread)
        if (!waits(*thread) || thread->line != line) {
            const long who = thread - threads.begin();
            fail("thread " + std::to_string(who) + " isn't at " + where + " of line "
                 + std::to_string(std::find_if(begins, ends, waits)->line)
                 + " where others wait");
            return false;
        }
    return true;
}

void shuffle_warp(int first)
{
    for (int lane = 0; lane < warpSize; ++lane) threads[first + lane].state = READY;
    std::vector<float> given(warpSize);
    for (int lane = 0; lane < warpSize; ++lane) given[lane] = threads[first + lane].value;
    for (int lane = 0; lane < warpSize; ++lane) {
        const int from = lane ^ threads[first + lane].lanes;
        if (from < warpSize) threads[first + lane].value = given[from];
    }
}

// 0, 1, ... in the order that was chosen.
std::vector<int> turns(int count)
{
    std::vector<int> numbers(count);
    for (int i = 0; i < count; ++i) numbers[i] = i;
    if (order == 1) std::reverse(numbers.begin(), numbers.end());
    unsigned seed = order;
    for (int i = count; order > 1 && i > 1; --i) {
        seed = seed * 1664525u + 1013904223u;
        std::swap(numbers[i - 1], numbers[seed % i]);
    }
    return numbers;
}

// A warp runs until it waits at a barrier or has returned, so others may be far behind it.
void run_warp(int first, const std::vector<int> &lanes, bool is_new)
{
    do {
        for (int lane : lanes)
            if (threads[first + lane].state == READY) resume(first + lane, is_new);
        is_new = false;
        if (!all_wait(first, first + warpSize, AT_SHUFFLE, "the shuffle")) return;
        shuffle_warp(first);
    } while (true);
}

void run_block(int num_threads, int shared_bytes)
{
    const std::vector<uint32_t> poison(SHARED_WORDS + 64, POISON);
    std::memcpy(shared_memory, poison.data(), sizeof shared_memory);
    const std::vector<int> warps = turns(num_threads / warpSize), lanes = turns(warpSize);
    for (Thread &thread : threads) thread.state = READY;
    for (bool is_new = true; fault.empty(); is_new = false) {
        for (int warp : warps) run_warp(warp * warpSize, lanes, is_new);
        if (!all_wait(0, num_threads, AT_BARRIER, "the barrier")) break;
        for (Thread &thread : threads) thread.state = READY;
    }
    const size_t words = (shared_bytes + 3) / 4;
    if (std::memcmp(shared_memory + words, poison.data(), sizeof shared_memory - 4 * words))
        fail("a thread wrote past the shared memory");
}

}  // namespace

namespace on_cpu {

void barrier(int line) { wait(AT_BARRIER, line); }

float exchange(unsigned long long mask, float x, int lanes, int line)
{
    if ((mask & 0xffffffff) != 0xffffffff) fail("a shuffle leaves lanes out");
    threads[current].value = x;
    threads[current].lanes = lanes;
    const int number = current;
    wait(AT_SHUFFLE, line);
    return threads[number].value;
}

void launch(const std::function<void()> &thread, dim3 grid, int num_threads, int shared_bytes)
{
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
        return fail("a grid that CUDA doesn't launch");
    if (shared_bytes > 4 * SHARED_WORDS) return fail("more shared memory than a block may have");
    if (num_threads % warpSize) return fail("a block that isn't made of whole warps");
    body = &thread;
    gridDim = grid;
    threads.resize(num_threads);
    for (int block : turns(grid.x * grid.y * grid.z)) {
        if (!fault.empty()) return;
        blockIdx = dim3(block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y);
        run_block(num_threads, shared_bytes);
    }
}

}  // namespace on_cpu

std::string last_fault;

cudaError_t cudaGetLastError()
{
    last_fault.swap(fault);
    fault.clear();
    return last_fault.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorLaunchFailure ? last_fault.c_str() : "invalid argument";
}
