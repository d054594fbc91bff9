#pragma once
#include <metal_stdlib>

constant constexpr uint kSide = 32;
constant constexpr uint kDepth = 16;

// A tile of a matrix, with zeros where it lies outside of the matrix.
template <uint Rows, uint Columns, typename T>
METAL_FUNC void copy_tile(threadgroup T* to, const device T* from, uint2 corner,
                          uint2 shape, uint thread_index) {
  for (uint i = thread_index; i < Rows * Columns; i += 128) {
    const uint2 at = corner + uint2(i / Columns, i % Columns);
    const bool inside = at.x < shape.x && at.y < shape.y;
    to[i] = inside ? from[at.x * shape.y + at.y] : T(0);
  }
}
