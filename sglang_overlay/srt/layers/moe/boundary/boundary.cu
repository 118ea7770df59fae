// Finalize + shared expert + all-reduce + residual + RMSNorm in one kernel, over an exchange plane of unicast stores.
//
// Every rank holds a plane, mapped by its peers (CUDA IPC). A row travels as 16-byte packets, each of which carries
// its own proof of arrival, so there are no flags, fences or clearing: a receiver reads a packet until its tag is the
// one it waits for. How the regimes, the packet and the tag work: docs/boundary.md.
//
// Compiled once per configuration with -DWORLD_SIZE, -DHIDDEN, -DTOP_K, -DACTIVATION (__nv_bfloat16 or __half) and
// -DWEIGHT (float or __nv_bfloat16); see module.py.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>

namespace {

static_assert(HIDDEN % 8 == 0 && HIDDEN <= 8192 && WORLD_SIZE >= 1 && WORLD_SIZE <= 8 && TOP_K >= 1 && TOP_K <= 64);
constexpr int kPacketElements = 8;
constexpr int kPackets = HIDDEN / kPacketElements;  // of a row
constexpr int kMaxThreads = 512;
constexpr int kMaxCluster = 8;
// A rank alone exchanges nothing: no packets, no counters, and its part is never rounded.
constexpr bool kAlone = WORLD_SIZE == 1;
constexpr int kPeers = kAlone ? 1 : WORLD_SIZE - 1;  // of arrays, which cannot be empty
// Partial sums of squares of a row: one per warp of its cluster, most where the cluster is largest.
constexpr int kSlots = kMaxCluster * ((kPackets + 32 * kMaxCluster - 1) / (32 * kMaxCluster));

// ---------------------------------------------------------------------------------------------- packets
// Eight elements in 16 bytes: each a half whose exponent field is at most 7, so that bits 13 and 14 of it are free.
// The 16 free bits hold the exponent the packet is scaled by and the tag. 11 significant bits, where bf16 has 8.

constexpr uint32_t kPayloadMask = 0x9fff9fffu;
constexpr uint32_t kTagMask = 0x00006000u;
constexpr int kSmallestCode = 32;
constexpr int kLargestCode = 190;
// A packet that holds an Inf, a NaN or a value of 2^64 and more: elements are the upper 14 bits of their fp32 pattern.
constexpr uint32_t kPlainCode = 255;

struct Tag {
  uint32_t words[4];
};

__device__ __forceinline__ Tag make_tag(uint32_t launch, uint32_t use) {
  // use & 3 tells a packet from what its slot held before, launch & 63 from one of another launch.
  const uint32_t tag = (launch & 63u) << 2 | (use & 3u);
  return {{(tag & 3u) << 13, (tag >> 2 & 3u) << 13, (tag >> 4 & 3u) << 13, (tag >> 6 & 3u) << 13}};
}

__device__ __forceinline__ bool has_arrived(const uint4& packet, const Tag& tag) {
  const uint32_t difference = (packet.x ^ tag.words[0]) | (packet.y ^ tag.words[1]) |
                              (packet.z ^ tag.words[2]) | (packet.w ^ tag.words[3]);
  return (difference & kTagMask) == 0;
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  const __half2 halves = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&halves);
}

__device__ __forceinline__ uint32_t plain_element(float value) {
  const uint32_t bits = __float_as_uint(value) >> 18;
  const uint32_t kept = value != value ? 0x1ff0u : bits;
  return (kept & 0x2000u) << 2 | (kept & 0x1fffu);
}

__device__ __forceinline__ float plain_value(uint32_t half) {
  return __uint_as_float((half & 0x8000u) << 16 | (half & 0x1fffu) << 18);
}

// The larger magnitude; NaN where one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(fabsf(b)));
  return result;
}

__device__ __forceinline__ uint4 encode(const float (&values)[kPacketElements], const Tag& tag) {
  float largest = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < kPacketElements; ++i) largest = larger(largest, values[i]);
  // Half a unit of the 11th bit: the exponent after rounding.
  uint32_t code = (__float_as_uint(largest) + 0x1000u) >> 23;
  uint32_t words[4];
  if (code <= kLargestCode) {
    code = max(code, static_cast<uint32_t>(kSmallestCode));
    const float scale = __uint_as_float((246u - code) << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack_halves(values[2 * i] * scale, values[2 * i + 1] * scale);
  } else {
    code = kPlainCode;
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = plain_element(values[2 * i]) | plain_element(values[2 * i + 1]) << 16;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] |= tag.words[i] | (code >> (2 * i) & 3u) << 29;
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void add_decoded(float (&total)[kPacketElements], const uint4& packet) {
  const uint32_t words[4] = {packet.x, packet.y, packet.z, packet.w};
  uint32_t code = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) code |= (words[i] >> 29 & 3u) << (2 * i);
  if (code != kPlainCode) {
    const float scale = __uint_as_float((code + 8u) << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = words[i] & kPayloadMask;
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      total[2 * i] = fmaf(pair.x, scale, total[2 * i]);
      total[2 * i + 1] = fmaf(pair.y, scale, total[2 * i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[2 * i] += plain_value(words[i] & 0xffffu);
      total[2 * i + 1] += plain_value(words[i] >> 16);
    }
  }
}

// ---------------------------------------------------------------------------------------------- memory

__device__ __forceinline__ void push_packet(uint4* slot, const uint4& packet) {
  // One 16-byte store that cannot tear: PTX gives single-copy atomicity to the scalar type .b128.
  asm volatile(
      "{ .reg .b64 low, high; .reg .b128 packet;\n"
      "mov.b64 low, {%1, %2};\n"
      "mov.b64 high, {%3, %4};\n"
      "mov.b128 packet, {low, high};\n"
      "st.relaxed.sys.global.b128 [%0], packet; }"
      :
      : "l"(slot), "r"(packet.x), "r"(packet.y), "r"(packet.z), "r"(packet.w)
      : "memory");
}

__device__ __forceinline__ uint4 peek_packet(const uint4* slot) {
  uint4 packet;
  asm volatile(
      "{ .reg .b64 low, high; .reg .b128 packet;\n"
      "ld.relaxed.sys.global.b128 packet, [%4];\n"
      "mov.b128 {low, high}, packet;\n"
      "mov.b64 {%0, %1}, low;\n"
      "mov.b64 {%2, %3}, high; }"
      : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w)
      : "l"(slot)
      : "memory");
  return packet;
}

__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Zeros, and of no weight, where there is no row. In one piece, so that the compiler sees four words and not what they
// may be, and is done with the index when the load is under way.
__device__ __forceinline__ uint4 load_row(const void* base, int row, uint32_t stride, float& weight) {
  uint4 value;
  asm volatile(
      "{ .reg .pred there; .reg .b64 at;\n"
      "setp.ge.s32 there, %6, 0;\n"
      "selp.f32 %4, %4, 0f00000000, there;\n"
      "mad.wide.u32 at, %6, %7, %5;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@there ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [at];\n}"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w), "+f"(weight)
      : "l"(base), "r"(row), "r"(stride));
  return value;
}

// Of what every thread of a block reads: may stay in L1.
__device__ __forceinline__ uint4 load_shared_by_all(const void* address) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// On whole words: taken apart as 16-bit values, a bf16 costs three instructions in place of one.
__device__ __forceinline__ float2 to_floats(uint32_t word) {
  if constexpr (std::is_same_v<ACTIVATION, __nv_bfloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

__device__ __forceinline__ void unpack(const uint4& words, float (&values)[kPacketElements]) {
  const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = to_floats(each[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint32_t to_word(float low, float high) {
  ACTIVATION pair[2] = {static_cast<ACTIVATION>(low), static_cast<ACTIVATION>(high)};
  uint32_t word;
  memcpy(&word, pair, 4);
  return word;
}

__device__ __forceinline__ uint4 pack(const float (&values)[kPacketElements]) {
  return make_uint4(to_word(values[0], values[1]), to_word(values[2], values[3]), to_word(values[4], values[5]),
                    to_word(values[6], values[7]));
}

// ---------------------------------------------------------------------------------------------- arguments

struct Inputs {
  const ACTIVATION* gemm2_out;
  const int32_t* index;
  const WEIGHT* weights;
  const ACTIVATION* shared;  // or null
  const ACTIVATION* residual;
  const ACTIVATION* gamma;
  ACTIVATION* norm_out;
  ACTIVATION* residual_out;
  uint32_t gemm2_stride, shared_stride, residual_stride;  // bytes
  float scale, eps, weight_bias;
  int num_tokens;
};

// A region of a rank's plane, for launches of one regime: partials [2][WORLD_SIZE][max_tokens][kPackets], reduced
// [2][max_tokens][kPackets], both of 16-byte packets, then uses [max_tokens] and the launch counter, both of 4 bytes.
struct Plane {
  uint4* base[WORLD_SIZE];
  int rank, max_tokens;
  uint64_t timeout_ns;

  __device__ __forceinline__ uint4* partial(int owner, int source, uint32_t use, int token) const {
    return base[owner] + (static_cast<int64_t>((use & 1u) * WORLD_SIZE + source) * max_tokens + token) * kPackets;
  }
  __device__ __forceinline__ uint4* reduced(int owner, uint32_t use, int token) const {
    return base[owner] + (static_cast<int64_t>(2 * WORLD_SIZE + (use & 1u)) * max_tokens + token) * kPackets;
  }
  __device__ __forceinline__ uint32_t* uses() const {
    return reinterpret_cast<uint32_t*>(base[rank] + static_cast<int64_t>(2 * WORLD_SIZE + 2) * max_tokens * kPackets);
  }
  __device__ __forceinline__ uint32_t* launches() const { return uses() + max_tokens; }
};

// What a launch adds to the launch counter in all: the last bits count its clusters, so that the launch number
// stays the same until every cluster of the launch has read it.
constexpr uint32_t kLaunchStep = 1u << 16;

__device__ __noinline__ void give_up(int rank, int token, int source, int seconds) {
  printf("MoE boundary kernel: rank %d waited %d s in vain for rank %d's part of token %d. That rank has died, hangs, "
         "or ran this layer with another number of tokens. Stopping.\n",
         rank, seconds, source, token);
  __trap();
}

// Reads COUNT packets until all have arrived. Lanes of a warp go together; an inactive lane waits for nothing.
template <int COUNT, class Slot, class Source>
__device__ __forceinline__ void await_packets(uint4 (&packets)[COUNT], Slot slot, Source source, const Tag& tag,
                                              bool active, const Plane& plane, int token) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    if (active) packets[i] = peek_packet(slot(i));
  uint64_t begin = 0;
  for (uint32_t tries = 0;; ++tries) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (active && !has_arrived(packets[i], tag)) missing = i;
    if (!__any_sync(0xffffffffu, missing >= 0)) return;
    if ((tries & 1023u) == 1023u) {
      if (begin == 0) begin = now_ns();
      if (missing >= 0 && now_ns() - begin > plane.timeout_ns)
        give_up(plane.rank, token, source(missing), static_cast<int>(plane.timeout_ns / 1000000000ull));
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (active && !has_arrived(packets[i], tag)) packets[i] = peek_packet(slot(i));
  }
}

// ---------------------------------------------------------------------------------------------- stages

// The rows of COUNT experts; of those beyond the token's, none.
template <int COUNT>
__device__ __forceinline__ void load_index(const int32_t* index, int left, int (&rows)[COUNT]) {
  if constexpr (TOP_K % 4 == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; k += 4) {
      uint4 four = make_uint4(~0u, ~0u, ~0u, ~0u);
      if (k < left) four = load_shared_by_all(index + k);
      rows[k] = four.x, rows[k + 1] = four.y, rows[k + 2] = four.z, rows[k + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) rows[k] = k < left ? index[k] : -1;
  }
}

template <int COUNT>
__device__ __forceinline__ void load_weights(const WEIGHT* weights, int left, float (&values)[COUNT]) {
  if constexpr (TOP_K % 4 == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; k += 4) {
      if (k >= left) break;
      if constexpr (sizeof(WEIGHT) == 4) {
        const uint4 four = load_shared_by_all(weights + k);
        values[k] = __uint_as_float(four.x), values[k + 1] = __uint_as_float(four.y);
        values[k + 2] = __uint_as_float(four.z), values[k + 3] = __uint_as_float(four.w);
      } else {
        const uint2 four = *reinterpret_cast<const uint2*>(weights + k);
        values[k] = __uint_as_float(four.x << 16), values[k + 1] = __uint_as_float(four.x & 0xffff0000u);
        values[k + 2] = __uint_as_float(four.y << 16), values[k + 3] = __uint_as_float(four.y & 0xffff0000u);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < COUNT; ++k)
      if (k < left) values[k] = static_cast<float>(weights[k]);
  }
}

constexpr int kUnroll = TOP_K < 8 ? TOP_K : 8;

// Where up to kUnroll of a token's experts have their rows, and what these weigh.
struct Routes {
  int rows[kUnroll];
  float weights[kUnroll];

  __device__ __forceinline__ void load(const Inputs& in, int token, int begin) {
    const int64_t first = static_cast<int64_t>(token) * TOP_K + begin;
    load_index(in.index + first, TOP_K - begin, rows);
    load_weights(in.weights + first, TOP_K - begin, weights);
  }
};

__device__ __forceinline__ const char* row_of(const ACTIVATION* rows, int token, uint32_t stride, int column) {
  return reinterpret_cast<const char*>(rows + column * kPacketElements) + static_cast<uint64_t>(static_cast<uint32_t>(token)) * stride;
}

// This rank's part of eight columns: scale * sum_k weight * row + shared, in fp32. All rows of a group are asked for
// before the first is waited for.
__device__ __forceinline__ void finalize(const Inputs& in, Routes& routes, int token, int column,
                                         float (&total)[kPacketElements]) {
  uint4 shared = make_uint4(0, 0, 0, 0);
  if (in.shared != nullptr) shared = load_once(row_of(in.shared, token, in.shared_stride, column));
#pragma unroll
  for (int i = 0; i < kPacketElements; ++i) total[i] = 0.0f;
  const void* base = in.gemm2_out + column * kPacketElements;
  for (int begin = 0; begin < TOP_K; begin += kUnroll) {
    if (begin > 0) routes.load(in, token, begin);
    uint4 values[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) values[k] = load_row(base, routes.rows[k], in.gemm2_stride, routes.weights[k]);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const float weight = routes.weights[k];
      float row[kPacketElements];
      unpack(values[k], row);
#pragma unroll
      for (int i = 0; i < kPacketElements; ++i) total[i] = fmaf(row[i], weight, total[i]);
    }
  }
  float add[kPacketElements];
  unpack(shared, add);
#pragma unroll
  for (int i = 0; i < kPacketElements; ++i) total[i] = fmaf(total[i], in.scale, add[i]);
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}

__device__ __forceinline__ int cluster_count() {
  int value;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(value));
  return value;
}

__device__ __forceinline__ int cluster_index() {
  int value;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint32_t in_other_block(uint32_t address, uint32_t block) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The sums of squares of a row, one per warp of its cluster, and the barrier that counts their arrival.
struct RowSum {
  __align__(16) float slots[kSlots];
  uint64_t barrier;

  __device__ __forceinline__ void initialize() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
  }
  __device__ __forceinline__ void expect(uint32_t warps) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)),
                 "r"(warps * 4)
                 : "memory");
  }
  __device__ __forceinline__ void send(float value, uint32_t slot, uint32_t block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     in_other_block(shared_address(slots + slot), block)),
                 "r"(__float_as_uint(value)), "r"(in_other_block(shared_address(&barrier), block))
                 : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
        "r"(phase)
        : "memory");
  }
};

// The sum over all threads of the cluster, in an order fixed by the launch's shape: the same bits everywhere.
__device__ __forceinline__ float sum_over_row(float value, RowSum& row, uint32_t phase, uint32_t blocks,
                                              uint32_t block) {
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if (lane < blocks) row.send(value, block * warps + warp, lane);
  row.wait(phase);
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kSlots; i += 4) {
    const float4 part = *reinterpret_cast<const float4*>(row.slots + i);
    sums.x += part.x, sums.y += part.y, sums.z += part.z, sums.w += part.w;
  }
  return (sums.x + sums.y) + (sums.z + sums.w);
}

// What a thread keeps of its part of a token: the packet that peers get, or, without peers, the part itself.
struct Pushed {
  uint4 packet;
  uint32_t use;
  float part[kPacketElements];
};

// Gathers and weighs this thread's columns of a token and sends them off.
template <bool TWO_SHOT>
__device__ __forceinline__ Pushed push_part(const Inputs& in, const Plane& plane, uint32_t launch, int token,
                                            int column, bool active) {
  Pushed pushed;
  // What the rows' addresses hang on comes first, so that nothing else is waited for before it. (Inactive lanes read it
  // too: a branch here would make the compiler wait for the counters before it.)
  Routes routes;
  routes.load(in, token, 0);
  if (!kAlone) pushed.use = static_cast<volatile uint32_t*>(plane.uses())[token] + 1;
  float part[kPacketElements];
  finalize(in, routes, token, column, part);
  if constexpr (kAlone) {
#pragma unroll
    for (int i = 0; i < kPacketElements; ++i) pushed.part[i] = part[i];
    return pushed;
  }
  pushed.packet = encode(part, make_tag(launch, pushed.use));
  const int rank = plane.rank;
  if (TWO_SHOT) {
    const int owner = token % WORLD_SIZE;
    if (active && owner != rank) push_packet(plane.partial(owner, rank, pushed.use, token) + column, pushed.packet);
  } else {
#pragma unroll
    for (int step = 1; step < WORLD_SIZE; ++step) {
      const int peer = rank + step < WORLD_SIZE ? rank + step : rank + step - WORLD_SIZE;
      if (active) push_packet(plane.partial(peer, rank, pushed.use, token) + column, pushed.packet);
    }
  }
  return pushed;
}

// The sum over ranks of this thread's columns of a token, the same bits on every rank.
template <bool TWO_SHOT>
__device__ __forceinline__ void reduce(const Plane& plane, const Pushed& own, const Tag& tag, int token, int column,
                                       bool active, float (&total)[kPacketElements]) {
  const int rank = plane.rank;
#pragma unroll
  for (int i = 0; i < kPacketElements; ++i) total[i] = kAlone ? own.part[i] : 0.0f;
  if (kAlone) return;
  const bool reduces = !TWO_SHOT || token % WORLD_SIZE == rank;
  if (reduces) {
    uint4 parts[kPeers];
    // The peers in the order of ranks, this rank left out.
    // Of two parts the sum is the same in either order, so this rank's own is decoded before the peer's is there.
    constexpr bool kOwnFirst = WORLD_SIZE == 2;
    if (kOwnFirst) add_decoded(total, own.packet);
    await_packets<kPeers>(
        parts, [&](int i) { return plane.partial(rank, i + (i >= rank), own.use, token) + column; },
        [&](int i) { return i + (i >= rank); }, tag, active, plane, token);
    if (kOwnFirst) {
      add_decoded(total, parts[0]);
    } else if (active) {
#pragma unroll
      for (int source = 0; source < WORLD_SIZE; ++source) {
        uint4 packet = own.packet;
#pragma unroll
        for (int i = 0; i < kPeers; ++i)
          if (i + (i >= rank) == source) packet = parts[i];
        add_decoded(total, packet);
      }
    }
  }
  if (TWO_SHOT) {
    uint4 sum[1];
    if (reduces) {
      if (active) {
        sum[0] = encode(total, tag);
#pragma unroll
        for (int step = 1; step < WORLD_SIZE; ++step) {
          const int peer = rank + step < WORLD_SIZE ? rank + step : rank + step - WORLD_SIZE;
          push_packet(plane.reduced(peer, own.use, token) + column, sum[0]);
        }
      }
    } else {
      await_packets<1>(
          sum, [&](int) { return plane.reduced(rank, own.use, token) + column; },
          [&](int) { return token % WORLD_SIZE; }, tag, active, plane, token);
    }
#pragma unroll
    for (int i = 0; i < kPacketElements; ++i) total[i] = 0.0f;
    if (active) add_decoded(total, sum[0]);
  }
}

// A cluster takes the tokens cluster, cluster + clusters, ... and pushes each before it waits for the one before, so
// that gathering hides behind the exchange. A thread keeps the same eight columns throughout.
template <bool TWO_SHOT>
__global__ void __launch_bounds__(kMaxThreads, 2)
    boundary_kernel(const __grid_constant__ Inputs in, const __grid_constant__ Plane plane) {
  __shared__ RowSum sums[2];
  const uint32_t blocks = cluster_size(), block = cluster_rank();
  const int clusters = cluster_count(), cluster = cluster_index();  // not by division, which takes 40 instructions
  const int own_column = block * blockDim.x + threadIdx.x;
  const bool active = own_column < kPackets;
  // A thread without columns reads others' and sends and writes nothing: cheaper than not to read.
  const int column = active ? own_column : kPackets - 1;
  const uint32_t warps = blocks * (blockDim.x >> 5);
  // Slots that this launch has no warp for stay zero.
  if (threadIdx.x >= warps && threadIdx.x < kSlots) sums[0].slots[threadIdx.x] = sums[1].slots[threadIdx.x] = 0.0f;
  if (threadIdx.x == 0) {
    for (RowSum& row : sums) row.initialize();
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (RowSum& row : sums) row.expect(warps);
  }
  // Arrived at here, waited for after the first push: no block sends to one that is not ready. Relaxed, since a release
  // is a fence of the whole GPU: the barriers have a fence of their own, and the zeros nobody sends to.
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // Only now: what a dependent kernel reads before its own wait is then complete.
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const uint32_t launch = kAlone ? 0 : *static_cast<volatile uint32_t*>(plane.launches()) / kLaunchStep;
  Pushed next = push_part<TWO_SHOT>(in, plane, launch, cluster, column, active);
  __syncwarp();  // lanes without columns may have gone ahead, and an aligned barrier takes whole warps
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  uint32_t turn = 0;
  for (int token = cluster; token < in.num_tokens; token += clusters, ++turn) {
    const Pushed own = next;
    if (token + clusters < in.num_tokens)
      next = push_part<TWO_SHOT>(in, plane, launch, token + clusters, column, active);
    // These arrive while the peers' packets are on their way; gamma not held from the start, for want of registers.
    const uint4 residual_words = load_once(row_of(in.residual, token, in.residual_stride, column));
    const uint4 gamma_words = load_shared_by_all(in.gamma + column * kPacketElements);
    float total[kPacketElements];
    reduce<TWO_SHOT>(plane, own, make_tag(launch, own.use), token, column, active, total);
    float residual[kPacketElements];
    unpack(residual_words, residual);
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacketElements; ++j) {
      total[j] += residual[j];
      squares = fmaf(total[j], total[j], squares);
    }
    RowSum& row = sums[turn & 1];
    squares = sum_over_row(active ? squares : 0.0f, row, turn >> 1 & 1, blocks, block);
    if (!kAlone && block == 0 && threadIdx.x == 0) plane.uses()[token] = own.use;
    if (active) {
      const int64_t at = static_cast<int64_t>(token) * HIDDEN + column * kPacketElements;
      *reinterpret_cast<uint4*>(in.residual_out + at) = pack(total);
      const float factor = rsqrtf(fmaf(squares, 1.0f / HIDDEN, in.eps));
      float gamma[kPacketElements];
      unpack(gamma_words, gamma);
#pragma unroll
      for (int j = 0; j < kPacketElements; ++j) total[j] *= factor * (gamma[j] + in.weight_bias);
      *reinterpret_cast<uint4*>(in.norm_out + at) = pack(total);
    }
    if (threadIdx.x == 0) row.expect(warps);
  }
  // Behind the sum over the whole cluster: all its threads have read the launch number.
  if (!kAlone && block == 0 && threadIdx.x == 0)
    atomicAdd(plane.launches(), cluster == 0 ? kLaunchStep - (clusters - 1) : 1u);
}

// ---------------------------------------------------------------------------------------------- host

using tvm::ffi::Bytes;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
}

int64_t plane_bytes(int64_t max_tokens) {
  if (kAlone) return 1;  // an address, all the same
  return (2 * WORLD_SIZE + 2) * max_tokens * kPackets * int64_t(sizeof(uint4)) +
         (max_tokens + 1) * int64_t(sizeof(uint32_t));
}

int64_t plane_allocate(int64_t bytes) {
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, bytes), "allocating the exchange plane");
  check(cudaMemset(pointer, 0, bytes), "clearing the exchange plane");
  check(cudaDeviceSynchronize(), "clearing the exchange plane");
  return reinterpret_cast<int64_t>(pointer);
}

void plane_free(int64_t pointer) { check(cudaFree(reinterpret_cast<void*>(pointer)), "freeing the exchange plane"); }

Bytes plane_export(int64_t pointer) {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(pointer)), "exporting the exchange plane");
  return Bytes(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

int64_t plane_open(Bytes exported) {
  cudaIpcMemHandle_t handle;
  if (exported.size() != sizeof(handle))
    TVM_FFI_THROW(ValueError) << "a plane's handle has " << sizeof(handle) << " bytes, got " << exported.size();
  memcpy(&handle, exported.data(), sizeof(handle));
  void* pointer = nullptr;
  check(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess), "mapping a peer's exchange plane");
  return reinterpret_cast<int64_t>(pointer);
}

void plane_close(int64_t pointer) {
  check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(pointer)), "unmapping a peer's exchange plane");
}

int threads_of(int cluster) { return ((kPackets + cluster - 1) / cluster + 31) / 32 * 32; }

// Loads the kernels, which the driver otherwise does at their first launch and may refuse during a graph capture.
void prepare() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, boundary_kernel<false>), "loading the MoE boundary kernel");
  check(cudaFuncGetAttributes(&attributes, boundary_kernel<true>), "loading the MoE boundary kernel");
}

template <bool TWO_SHOT>
void launch(const Inputs& in, const Plane& plane, int cluster, int clusters, cudaStream_t stream) {
  const int threads = threads_of(cluster);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(cluster * clusters);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, boundary_kernel<TWO_SHOT>, in, plane), "launching the MoE boundary kernel");
}

// planes: [WORLD_SIZE] int64 on the host, the plane of each rank as this process maps it.
void run(TensorView gemm2_out, TensorView index, TensorView weights, Optional<TensorView> shared, TensorView residual,
         TensorView gamma, TensorView norm_out, TensorView residual_out, double scale, double eps, double weight_bias,
         TensorView planes, int64_t rank, int64_t max_tokens, double timeout_s, bool two_shot, int64_t cluster,
         int64_t clusters) {
  Inputs in;
  in.gemm2_out = static_cast<const ACTIVATION*>(gemm2_out.data_ptr());
  in.index = static_cast<const int32_t*>(index.data_ptr());
  in.weights = static_cast<const WEIGHT*>(weights.data_ptr());
  in.shared = shared.has_value() ? static_cast<const ACTIVATION*>(shared.value().data_ptr()) : nullptr;
  in.residual = static_cast<const ACTIVATION*>(residual.data_ptr());
  in.gamma = static_cast<const ACTIVATION*>(gamma.data_ptr());
  in.norm_out = static_cast<ACTIVATION*>(norm_out.data_ptr());
  in.residual_out = static_cast<ACTIVATION*>(residual_out.data_ptr());
  const auto bytes = [](int64_t stride) {
    if (stride < 0 || stride > std::numeric_limits<uint32_t>::max() / int64_t(sizeof(ACTIVATION)))
      TVM_FFI_THROW(ValueError) << "rows " << stride << " elements apart: at most 2^31 - 1";
    return static_cast<uint32_t>(stride * int64_t(sizeof(ACTIVATION)));
  };
  in.gemm2_stride = bytes(gemm2_out.stride(0));
  in.shared_stride = shared.has_value() ? bytes(shared.value().stride(0)) : 0;
  in.residual_stride = bytes(residual.stride(0));
  in.scale = static_cast<float>(scale);
  in.eps = static_cast<float>(eps);
  in.weight_bias = static_cast<float>(weight_bias);
  in.num_tokens = static_cast<int>(residual.size(0));

  Plane plane;
  for (int i = 0; i < WORLD_SIZE; ++i)
    plane.base[i] = reinterpret_cast<uint4*>(static_cast<int64_t*>(planes.data_ptr())[i]);
  plane.rank = static_cast<int>(rank);
  plane.max_tokens = static_cast<int>(max_tokens);
  plane.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);

  const int c = static_cast<int>(cluster), n = static_cast<int>(clusters);
  if (c < 1 || c > kMaxCluster || threads_of(c) > kMaxThreads || c * threads_of(c) > 32 * kSlots || n < 1 ||
      n > in.num_tokens || n >= (1 << 16) || in.num_tokens > max_tokens || residual.size(1) != HIDDEN)
    TVM_FFI_THROW(ValueError) << "no such launch: " << in.num_tokens << " tokens of " << residual.size(1) << ", " << n
                              << " clusters of " << c << " blocks, a plane of " << max_tokens << " tokens";
  const DLDevice device = gemm2_out.device();
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  two_shot ? launch<true>(in, plane, c, n, stream) : launch<false>(in, plane, c, n, stream);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_bytes, plane_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_allocate, plane_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_free, plane_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_export, plane_export);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_open, plane_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plane_close, plane_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
