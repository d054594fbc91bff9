#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

// What the language has beside loops: vectors, conversions, functions, tables in constant memory.
constant float table[4] = {0.5, 1.0, 2.0, 4.0};

struct Parameters {
  uint count;
  float slope;
  packed_float3 offset;
};

struct Pair {
  float a, b;
  Pair() thread = default;
  Pair() threadgroup = default;
  METAL_FUNC float sum() const { return a + b; }
};

template <typename T, int N>
struct Block {
  T values[N];
  METAL_FUNC T at(uint i) const thread { return values[i]; }
};

float first_of(const device float* x) { return x[0]; }
float first_of(const threadgroup float* x) { return x[0]; }

kernel void language(
    device const float4* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant Parameters& parameters [[buffer(2)]],
    uint3 at [[thread_position_in_grid]],
    uint3 size [[threads_per_grid]]) {
  threadgroup float shared[4];
  if (at.y == 0 && at.x < 4) shared[at.x] = table[at.x];
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  const uint i = at.x + size.x * at.y;
  if (i >= parameters.count) return;
  float4 v = x[i];
  v.xy = v.yx * 2;
  v.zw += float2(parameters.offset[0], parameters.offset[2]);
  float s = dot(v.xyz, float3(1, 2, 3)) + v.w;
  s = fma(s, parameters.slope, select(0.25, 0.5, i % 2 == 0));
  const half4 h = half4(v);
  s += float(h.x * 0.5h) + float(static_cast<bfloat>(v.y));
  s += metal::precise::exp(-fabs(s)) + fast::rsqrt(4.0f) + clamp(s, -1.0f, 1.0f);
  Pair p;
  p.a = table[i % 4];
  p.b = first_of(shared);
  Block<float, 2> block = {{p.sum(), 0.0f}};
  s += block.at(0) + as_type<float>(0x3f800000u) + any(v > 1e30f);
  s += first_of(reinterpret_cast<device const float*>(x)) * 0;
  y[i] = s;
}
