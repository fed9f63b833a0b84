// How NVFP4 linears lie on the device: in the order in which a warp's lanes take them.
//
// A unit is 8 rows x two steps of 64 k: step 16 i + w, then step 16 i + w + 8, of 256 B of codes each (lane 4 g + q: 8 B, the 16 k from
// 16 q on of row g), then 64 B of E4M3 scales (2 a lane: one a step). The matrix is [tile of 8 rows][w: 8][i: K / 1024] units; K is
// padded to 1,024 with zero codes and N to 16 with zeros. Half a word holds four codes of consecutive k, sign and magnitude at bits
// 15, 8..6; 12, 5..3; 14, 2..0; 13, 11..9: `expand_e2m1` (gemv_core.cuh).
#pragma once
#include "common.cuh"

#define UNIT 576

// Unit of step s (64 k) of a tile of 8 rows, and whether the step is its second.
DEV size_t unit_of(int tile, int s, int per) { return ((size_t)(tile * 8 + (s & 7)) * per + (s >> 4)) * UNIT; }
DEV int second_step(int s) { return (s >> 3) & 1; }

// Four codes of consecutive k (nibbles in rising order) in half a word.
DEV u32 place_e2m1(u32 h) {
  const u32 a = h & 15, b = (h >> 4) & 15, c = (h >> 8) & 15, d = (h >> 12) & 15;
  return (a & 7) << 6 | (a & 8) << 12 | (b & 7) << 3 | (b & 8) << 9 | (c & 7) | (c & 8) << 11 | (d & 7) << 9 | (d & 8) << 10;
}
// Code n of half a word.
DEV u32 code_e2m1(u32 h, int n) {
  const int m = n == 0 ? 6 : n == 1 ? 3 : n == 2 ? 0 : 9, s = n == 0 ? 15 : n == 1 ? 12 : n == 2 ? 14 : 13;
  return ((h >> m) & 7) | ((h >> s) & 1) << 3;
}

// Two E4M3 scales times 2^118, each in both halves of a register (`block_scale` of two).
DEV void block_scales(u32 b, u32& s0, u32& s1) {
  const u32 v = hmul2(hmul2(__byte_perm(b, 0, 0x4140) << 4, 0x7b807b80u), 0x7a807a80u);
  s0 = __byte_perm(v, 0, 0x1010), s1 = __byte_perm(v, 0, 0x3232);
}
