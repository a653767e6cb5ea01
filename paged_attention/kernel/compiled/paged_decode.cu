// PagedAttention V2 for decoding: one new token of each sequence attends to its paged KV cache.
//
// Phase 1. A block of threads takes one partition of one sequence, and up to 8 query heads that
// share a KV head. So K and V are read once for all of them. It writes the partition's state:
//     max_logits  the largest logit, scaled, ALiBi included
//     exp_sums    the sum of exp(logit - max_logit)
//     tmp_out     the attention over the partition, normalised
// Phase 2. A block of threads merges the states of one sequence and head into `out` and `lse`.
//
// The layout is vLLM's, x = 8 lanes in 16 bytes:
//     key    (num_blocks, num_kv_heads, head_size / x, block_size, x)
//     value  (num_blocks, num_kv_heads, head_size, block_size)
//
// The language is CUDA 10.2's. A warp may have 32 or 64 lanes, so warpSize is read. Lanes exchange
// numbers by shuffles within a warp, and through shared memory with __syncthreads() between.
// fp16 is converted by cuda_fp16.h, which every CUDA has, because that is one instruction. bf16 is
// converted by its bits, because cuda_bf16.h came later, and it is the upper half of a float.

#include <cuda_fp16.h>

#ifndef LOAD_WORDS
#define LOAD_WORDS 1  // how many 32-bit words of a cache a thread loads at once: 1, 2 or 4
#endif
#define ABI 1        // of Step, and of the names that a caller looks up
#define THREADS 256  // in a block, a multiple of every warp's size
#define ROWS 4       // rows of a product that a thread works on at once
#define LOWEST __uint_as_float(0xff800000)  // -inf
#define NOT_A_NUMBER __uint_as_float(0x7fc00000)

enum Dtype { FLOAT32, FLOAT16, BFLOAT16 };

struct Step {
    void *out;                   // (num_seqs, num_heads, head_size), of out_dtype
    float *lse;                  // (num_seqs, num_heads)
    float *exp_sums;             // (num_seqs, num_heads, num_partitions)
    float *max_logits;           // the same
    float *tmp_out;              // (num_seqs, num_heads, num_partitions, head_size)
    const unsigned short *query;  // (num_seqs, num_heads, head_size), fp16 or bf16 as the caches
    const unsigned short *key_cache;
    const unsigned short *value_cache;
    const int *block_tables;  // (num_seqs, max_blocks)
    const int *seq_lens;      // (num_seqs,)
    const float *alibi_slopes;  // (num_heads,), or null
    long long query_stride;     // elements from one sequence's query to the next one's
    long long key_stride;       // elements from one block to the next
    long long value_stride;
    float scale;
    int num_seqs, num_heads, num_kv_heads, head_size, block_size, num_blocks, max_blocks;
    int partition_size;    // a multiple of block_size
    int num_partitions;    // those of the longest sequence
    int heads_at_once;     // the HEADS of Phase 1, at most 8
    int shared_bytes;      // of Phase 1
    int dtype, out_dtype;  // Dtype
};

// What a loader compares with its own: see library.py.
#define ABOUT { ABI, (int)sizeof(Step), LOAD_WORDS }
extern "C" {
__constant__ int paged_decode_about[3] = ABOUT;
}

struct __align__(4 * LOAD_WORDS) Words {
    unsigned word[LOAD_WORDS];
};
#define LANES (2 * LOAD_WORDS)  // fp16 or bf16 numbers in them

template <bool IS_BF16>
__device__ float number(unsigned bits)
{
    return IS_BF16 ? __uint_as_float(bits << 16)
                   : __half2float(__ushort_as_half((unsigned short)bits));
}

__device__ void store(void *out, int dtype, long long at, float x)
{
    if (dtype == FLOAT32) {
        ((float *)out)[at] = x;
    } else if (dtype == FLOAT16) {
        ((unsigned short *)out)[at] = __half_as_ushort(__float2half_rn(x));
    } else {  // to the nearest, and to the even one of two that are as near
        const unsigned bits = __float_as_uint(x), odd = (bits >> 16) & 1;
        ((unsigned short *)out)[at] = x == x ? (bits + 0x7fff + odd) >> 16 : 0x7fc0;
    }
}

// The sum, or the largest, of x over groups of `lanes` neighbours. All of them get it. All lanes of
// a warp must come here together.
#define EVERY_LANE 0xffffffff  // which kernels for CoreX pass, too, where a warp has 64 lanes
__device__ float sum_over(int lanes, float x)
{
    for (int apart = lanes / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(EVERY_LANE, x, apart);
    return x;
}

__device__ float largest_over(int lanes, float x)
{
    for (int apart = lanes / 2; apart > 0; apart /= 2)
        x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, apart));
    return x;
}

// The products of rows of a cache with `left`, which has HEADS rows in shared memory.
// For K a row is a token and its columns are lanes. For V a row is a lane, its columns are tokens.
// A row lies in the cache in strips of strip_columns, and strip(row, s) is where strip s begins, or
// null. TEAM neighbouring threads share a row, so that they load neighbouring words.
template <bool IS_BF16, int HEADS, int TEAM, typename Strip, typename Store>
__device__ void products(const float *left, int left_stride, int rows, int columns,
                         int strip_columns, Strip strip, Store write)
{
    const int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM, teams = THREADS / TEAM;
    for (int first = team; first - team < rows; first += ROWS * teams) {
        float sums[ROWS][HEADS] = {};
        for (int s = 0, start = 0; start < columns; ++s, start += strip_columns) {
            const int end = min(strip_columns, columns - start);
            for (int column = member * LANES; column < end; column += TEAM * LANES) {
                Words loaded[ROWS] = {};
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    const int row = first + r * teams;
                    const unsigned short *place = row < rows ? strip(row, s) : nullptr;
                    if (place) loaded[r] = *(const Words *)(place + column);
                }
#pragma unroll
                for (int i = 0; i < LANES; ++i) {
                    if (column + i >= end) break;  // unused memory may hold NaN
                    float numbers[ROWS];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
                        numbers[r] = number<IS_BF16>(loaded[r].word[i / 2] >> 16 * (i % 2) & 0xffff);
#pragma unroll
                    for (int h = 0; h < HEADS; ++h) {
                        const float x = left[h * left_stride + start + column + i];
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) sums[r][h] += x * numbers[r];
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
                const float sum = sum_over(TEAM, sums[r][h]);
                if (member == 0 && first + r * teams < rows) write(h, first + r * teams, sum);
            }
        }
    }
}

template <bool IS_BF16, int HEADS>
__device__ void phase1(const Step &step)
{
    const int group = step.num_heads / step.num_kv_heads;
    const int chunks = gridDim.x / step.num_kv_heads;  // of a group that is too large for one block
    const int kv_head = blockIdx.x / chunks, in_group = blockIdx.x % chunks * HEADS;
    const int first_head = kv_head * group + in_group, heads = min(HEADS, group - in_group);
    const int seq = blockIdx.y, partition = blockIdx.z, seq_len = step.seq_lens[seq];
    const int start = partition * step.partition_size;
    const int tokens = min(step.partition_size, seq_len - start);
    if (tokens <= 0) return;
    const int head_size = step.head_size, block_size = step.block_size;

    extern __shared__ float shared_memory[];
    float *query = shared_memory;                    // (HEADS, head_size), scaled
    float *logits = query + HEADS * head_size;         // (HEADS, partition_size), then the weights
    int *blocks = (int *)(logits + HEADS * step.partition_size);  // the ids, or -1
    for (int i = threadIdx.x; i < HEADS * head_size; i += THREADS) {
        const long long at = seq * step.query_stride + (long long)first_head * head_size + i;
        query[i] = i < heads * head_size ? step.scale * number<IS_BF16>(step.query[at]) : 0.0f;
    }
    for (int i = threadIdx.x; i * block_size < tokens; i += THREADS) {
        const int column = start / block_size + i;
        const int id = column < step.max_blocks
                           ? step.block_tables[(long long)seq * step.max_blocks + column] : -1;
        blocks[i] = id < step.num_blocks ? id : -1;
    }
    __syncthreads();

    // K times Q. A block that isn't in the pool is not read, and makes NaN.
    const long long of_head = (long long)kv_head * head_size * block_size;
    products<IS_BF16, HEADS, 4 / LOAD_WORDS>(
        query, head_size, tokens, head_size, 8,
        [&](int token, int piece) -> const unsigned short * {
            const int block = blocks[token / block_size];
            return block < 0 ? nullptr : step.key_cache + block * step.key_stride + of_head
                                             + (piece * block_size + token % block_size) * 8;
        },
        [&](int h, int token, float logit) {
            if (step.alibi_slopes && h < heads)
                logit += step.alibi_slopes[first_head + h] * (start + token - (seq_len - 1));
            if (blocks[token / block_size] < 0) logit = NOT_A_NUMBER;
            logits[h * step.partition_size + token] = logit;
        });
    __syncthreads();

    // The softmax. A warp takes a head, so that no other warp waits for it.
    const long long state = ((long long)seq * step.num_heads + first_head) * step.num_partitions;
    const int lane = threadIdx.x % warpSize;
    for (int h = threadIdx.x / warpSize; h < HEADS; h += THREADS / warpSize) {
        float *of_row = logits + h * step.partition_size, largest = LOWEST, sum = 0.0f;
        for (int t = lane; t < tokens; t += warpSize) largest = fmaxf(largest, of_row[t]);
        largest = largest_over(warpSize, largest);
        const float from = largest == LOWEST ? 0.0f : largest;  // -inf - -inf would be NaN
        for (int t = lane; t < tokens; t += warpSize) sum += of_row[t] = expf(of_row[t] - from);
        sum = sum_over(warpSize, sum);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (int t = lane; t < tokens; t += warpSize) of_row[t] *= inverse;
        if (lane == 0 && h < heads) {
            step.max_logits[state + h * step.num_partitions + partition] = largest;
            step.exp_sums[state + h * step.num_partitions + partition] = sum;
        }
    }
    __syncthreads();

    // The weights times V.
    products<IS_BF16, HEADS, 8 / LOAD_WORDS>(
        logits, step.partition_size, head_size, tokens, block_size,
        [&](int row, int s) -> const unsigned short * {
            const int block = blocks[s];
            return block < 0 ? nullptr
                             : step.value_cache + block * step.value_stride + of_head
                                   + row * block_size;
        },
        [&](int h, int row, float attention) {
            const long long at = state + h * step.num_partitions + partition;
            if (h < heads) step.tmp_out[at * head_size + row] = attention;
        });
}

// A kernel of Phase 1 for each number of heads, by a name that is not mangled.
#define EACH_HEADS(X, dtype, is_bf16)                                                  \
    X(dtype, is_bf16, 1) X(dtype, is_bf16, 2) X(dtype, is_bf16, 3) X(dtype, is_bf16, 4) \
    X(dtype, is_bf16, 5) X(dtype, is_bf16, 6) X(dtype, is_bf16, 7) X(dtype, is_bf16, 8)
#define PHASE1(dtype, is_bf16, heads)                            \
    extern "C" __global__ void __launch_bounds__(THREADS)        \
    paged_decode_phase1_##dtype##_##heads(const Step step)       \
    {                                                            \
        phase1<is_bf16, heads>(step);                            \
    }
EACH_HEADS(PHASE1, float16, false)
EACH_HEADS(PHASE1, bfloat16, true)

extern "C" __global__ void __launch_bounds__(THREADS) paged_decode_phase2(const Step step)
{
    const int head = blockIdx.x, seq = blockIdx.y, seq_len = step.seq_lens[seq];
    const int needed = (seq_len + (long long)step.partition_size - 1) / step.partition_size;
    const bool fits = seq_len >= 0 && needed <= step.num_partitions;  // else NaN tells
    const int partitions = fits ? needed : 0, lane = threadIdx.x % warpSize;
    const long long row = (long long)seq * step.num_heads + head;
    const float *max_logits = step.max_logits + row * step.num_partitions;
    const float *exp_sums = step.exp_sums + row * step.num_partitions;
    const float *tmp_out = step.tmp_out + row * step.num_partitions * step.head_size;

    // Each warp does this for itself, so that none waits for another.
    float largest = LOWEST, sum = 0.0f;
    for (int p = lane; p < partitions; p += warpSize) largest = fmaxf(largest, max_logits[p]);
    largest = largest_over(warpSize, largest);
    const float from = largest == LOWEST ? 0.0f : largest;
    for (int p = lane; p < partitions; p += warpSize)
        sum += exp_sums[p] * expf(max_logits[p] - from);
    sum = sum_over(warpSize, sum);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;

    for (int d = threadIdx.x; d < step.head_size; d += THREADS) {
        float attention = 0.0f;
#pragma unroll 8
        for (int p = 0; p < partitions; ++p)
            attention += exp_sums[p] * expf(max_logits[p] - from) * tmp_out[p * step.head_size + d];
        store(step.out, step.out_dtype, row * step.head_size + d,
              fits ? attention * inverse : NOT_A_NUMBER);
    }
    if (threadIdx.x == 0)
        step.lse[row] = !fits ? NOT_A_NUMBER : sum == 0.0f ? LOWEST : largest + logf(sum);
}

#ifndef __CUDACC_RTC__  // NVRTC compiles no host code: driver.py launches what it makes
#ifndef DEVICE_TYPE     // what tests/support/cuda_on_cpu defines, with a LAUNCH of its own
#define DEVICE_TYPE "cuda"
#define LAUNCH(kernel, grid, shared_bytes, stream, step) \
    kernel<<<grid, THREADS, shared_bytes, (cudaStream_t)stream>>>(step)
#endif

extern "C" {
const char *paged_decode_device_type() { return DEVICE_TYPE; }

void paged_decode_describe(int about[3])
{
    const int own[3] = ABOUT;
    for (int i = 0; i < 3; ++i) about[i] = own[i];
}

const char *paged_decode_error(int error) { return cudaGetErrorString((cudaError_t)error); }

// Returns a cudaError_t. Nothing is allocated, and nothing waits.
int paged_decode_run(const Step *step, void *stream)
{
#define NAMED(dtype, is_bf16, heads) paged_decode_phase1_##dtype##_##heads,
    static void (*const phase1[2][8])(const Step) = {
        { EACH_HEADS(NAMED, float16, false) }, { EACH_HEADS(NAMED, bfloat16, true) }
    };
    const int heads = step->heads_at_once, group = step->num_heads / step->num_kv_heads;
    if (heads < 1 || heads > 8 || (step->dtype != FLOAT16 && step->dtype != BFLOAT16))
        return cudaErrorInvalidValue;
    const dim3 grid1(step->num_kv_heads * ((group + heads - 1) / heads), step->num_seqs,
                     step->num_partitions);
    const dim3 grid2(step->num_heads, step->num_seqs);
    LAUNCH(phase1[step->dtype == BFLOAT16][heads - 1], grid1, step->shared_bytes, stream, *step);
    LAUNCH(paged_decode_phase2, grid2, 0, stream, *step);
    return cudaGetLastError();
}
}
#endif
