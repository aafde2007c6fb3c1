"""Mutants that survive, and why: (file, the mutated line) -> the reason."""

# No result changes, on any machine.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("arithmetic.h", "return metal::max(b, a);"): "max commutes",
    (
        "gated_delta.h",
        "const bool writes = live && column != 0;",
    ): "all eight lanes of a row hold its sum: seven write it instead of one",
    (
        "gated_delta_gates.h",
        "return add_rn(positive, log1p_rn(exp_rn(x >= 0.0f ? -x : x)));",
    ): "differs at zero alone, and exp(0) = exp(-0)",
    (
        "kv_write.h",
        "const int start = length <= 0 ? 0 : (length > last ? last : length);",
    ): "differs at zero alone, where both are zero",
    (
        "matrix.h",
        "a.x[i] = (whole ? count >= 0 : i < count) ? T(float(p[i])) : T(0.0f);",
    ): "`whole` is false in every kernel of a metallib",
    (
        "matrix.h",
        "a.x[i] = (whole && false ? count > 0 : i < count) ? T(float(p[i])) : T(0.0f);",
    ): "`whole` is false in every kernel of a metallib",
    (
        "verify_attention.h",
        "if (start >= block.end || start + DFLASH_CHUNK < first) {",
    ): "a chunk that no row sees is written, and read by nobody",
    (
        "verify_attention.h",
        "if (false && (start >= block.end || start + DFLASH_CHUNK <= first)) {",
    ): "a chunk that no row sees, or that is past the block, is written, and read by nobody",
    (
        "verify_attention.h",
        "if (key0 + 32 <= stop) {",
    ): "keys are fetched that the loop does not come to; fetch reads none past the block",
    (
        "verify_attention.h",
        "if (true || (staged)) {",
    ): "keys are fetched and not used",
    (
        "verify_attention.h",
        "key0 + 32 <= block.length && (key0 >= block.end - block.window);",
    ): "without a window `seen_by_all` is never set, and the bits of `seen` say the same",
    (
        "verify_attention.h",
        "if (true || (row == 0)) {",
    ): "all lanes of a column hold its statistics: eight write them instead of one",
    (
        "verify_attention.h",
        "if (row != 0) {",
    ): "all lanes of a column hold its statistics: seven write them instead of one",
    (
        "verify_attention.h",
        "Eight<T> keys_ahead[staged ? 4 * D / threads : 1],"
        " values_ahead[staged ? 4 * (Dv + 1) / threads : 1];",
    ): "registers that nobody uses",
    (
        "verify_attention.h",
        '_Pragma("unroll 8") for (int c = stripe + (first > stripe || true ? behind : 0)'
        " * DFLASH_STRIPES;",
    ): "`behind` is zero where first <= stripe: its numerator is from 0 to 15 there",
    (
        "verify_attention.h",
        "return D + (D % 64 != 0 ? 32 : 0);",
    ): "rows stand elsewhere in threadgroup memory: other banks, same values",
    (
        "verify_attention.h",
        "const float base = largest[c][e] == minus_infinity() ? 1.0f : largest[c][e];",
    ): "every score is -inf then, and exp2(-inf - 1) = exp2(-inf - 0) = 0",
    (
        "verify_attention.metal",
        "threadgroup T shared[staged ? 32 * (of_keys >= of_values ? of_keys : of_values) : 1];",
    ): "differs where both are equal",
    (
        "verify_matmul.h",
        "if (false && (k >= at.depth)) {",
    ): "past the depth load_eight and load_right read nothing and give zeros, which are added",
    (
        "verify_matmul.h",
        "return (n ^ (((m >> (1 + 1)) & 3) << 3)) & (outputs - 1);",
    ): "another permutation of each row of threadgroup memory: other banks, same values",
    (
        "verify_matmul.h",
        "return (n ^ (((m >> 1) & (3 + 1)) << 3)) & (outputs - 1);",
    ): "another permutation of each row of threadgroup memory: other banks, same values",
    (
        "verify_matmul.metal",
        "threadgroup float shared[DFLASH_SLICES * 16 * (tiles + 1) * 8 * column_tiles];",
    ): "threadgroup memory that nobody uses",
}

# A GPU may show these, the emulator does not; they count as alive.
BEYOND_THE_EMULATOR: dict[tuple[str, str, str], str] = {
    (
        "verify_attention.h",
        "barrier dropped",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ): "a shuffle lies between the write and the read, where the emulator's lanes meet anyway",
}
