// A block's threads on a CPU. Each is a coroutine, which runs until it comes to a barrier or to a
// shuffle. Blocks run one after the other. What CUDA leaves undefined is a fault here:
//     threads of a block wait at different barriers, or have returned while others wait
//     a lane takes part in a shuffle that another lane of its warp hasn't come to
//     a shuffle's mask leaves lanes out
//     a thread writes past the shared memory that the launch asked for
// Shared memory holds NaN when a block begins. The order in which threads have their turns can be
// chosen, because a result that depends on it lacks a barrier.
// Compiled after device.h, without _FORTIFY_SOURCE, whose longjmp doesn't leave a stack.

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

void permute(std::vector<int> &numbers, unsigned seed)
{
    if (order == 1) std::reverse(numbers.begin(), numbers.end());
    for (size_t i = numbers.size(); order > 1 && i > 1; --i) {
        seed = seed * 1664525u + 1013904223u;
        std::swap(numbers[i - 1], numbers[seed % i]);
    }
}

void run_block(int num_threads, int shared_bytes)
{
    std::vector<uint32_t> poison(SHARED_WORDS + 64, POISON);
    std::memcpy(shared_memory, poison.data(), sizeof shared_memory);
    std::vector<int> turns(num_threads);
    for (int i = 0; i < num_threads; ++i) {
        turns[i] = i;
        threads[i].state = READY;
        threads[i].line = 0;
    }
    permute(turns, order);
    for (bool is_new = true; fault.empty(); is_new = false) {
        for (int number : turns)
            if (threads[number].state == READY) resume(number, is_new);
        bool moved = false;
        for (int first = 0; first < num_threads; first += warpSize)
            if (all_wait(first, first + warpSize, AT_SHUFFLE, "the shuffle")) {
                shuffle_warp(first);
                moved = true;
            }
        if (moved) continue;
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
    std::vector<int> blocks(grid.x * grid.y * grid.z);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    permute(blocks, order + 1);
    for (int block : blocks) {
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

extern "C" void on_cpu_set(int lanes_of_a_warp, unsigned order_of_turns)
{
    warpSize = lanes_of_a_warp;
    order = order_of_turns;
}

// -- for the test of what cuda_fp16.h does here
#include "cuda_fp16.h"

extern "C" float on_cpu_half_to_float(unsigned short bits) { return __half2float({bits}); }
extern "C" unsigned short on_cpu_float_to_half(float x) { return __float2half_rn(x).bits; }
