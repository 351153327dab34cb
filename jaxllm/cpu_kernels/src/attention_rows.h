// Rows of one head's keys and values: where they lie in their pages, and what inner loops take instead of codes.
#pragma once

namespace ISA {

#if defined(__AMX_BF16__)
constexpr int KEYS_TOGETHER = 32;
#else
constexpr int KEYS_TOGETHER = 16;
#endif

// A key at or before `key` from which lanes, and inputs of a tile, count as from the begin of its block.
INLINE int aligned_key(int key) { return key / KEYS_TOGETHER * KEYS_TOGETHER; }

// Where the rows of keys [begin, begin + count) of one of the unit's heads lie; the last is repeated up to a multiple of KEYS_TOGETHER.
template <class T>
static void find_rows(const Attention& a, const AttentionUnit& u, int head, const void* pages, int row, int begin, int count, const T** rows) {
  const int32_t* page = a.page_table + int64_t(u.sequence) * a.columns + begin / a.page_size;
  int at = begin % a.page_size;
  for (int j = 0; j < count; page++, at = 0) {
    const T* p = (const T*)pages + ((int64_t(*page) * a.kv_heads + u.kv_head + head) * a.page_size + at) * row;
    for (const int end = smaller(count, j + a.page_size - at); j < end; j++, p += row) rows[j] = p;
  }
  for (int j = count; j % KEYS_TOGETHER; j++) rows[j] = rows[count - 1];
}

// Codes as numbers; those of e4m3 as 1/256 of what they are.
template <PageFormat F> INLINE Floats code_chunk(const uint8_t* p) {
  if constexpr (F == PageFormat::int8) return to_floats(load_i8(p));
  else return load_e4m3(p);
}
template <PageFormat F> INLINE float code_number(uint8_t code) {
  return F == PageFormat::int8 ? float(int8_t(code)) : float_of_e4m3(code) / 256;
}

template <PageFormat F> static void expand_codes(const uint8_t* codes, int size, float* out) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, code_chunk<F>(codes + i));
  for (; i < size; i++) out[i] = code_number<F>(codes[i]);
}

#if defined(__AVX512BF16__)
template <PageFormat F> static void expand_codes(const uint8_t* codes, int size, uint16_t* out) {  // exact: of bf16's 8 bits they need 7
  int i = 0;
  for (; i + LANES <= size; i += LANES) store_bf16(out + i, code_chunk<F>(codes + i));
  for (; i < size; i++) out[i] = bf16_of_float(code_number<F>(codes[i]));
}
#endif

// Rows of a block of keys, or of their values, and what the numbers in them are to be multiplied by.
template <class T> struct Rows {
  const T* at[KEY_BLOCK];
  float scales[KEY_BLOCK];
};

// Finds rows of codes, `row` long, and puts the numbers of `size` codes of each into `out` [count][size].
template <class T>
static void expand_rows(const Attention& a, const AttentionUnit& u, int head, const void* pages, int row, int size, int begin, int count, T* out, Rows<T>& rows) {
  find_rows(a, u, head, pages, row, begin, count, (const uint8_t**)rows.at);
  for (int j = 0; j < count; j++, out += size) {
    const uint8_t* codes = (const uint8_t*)rows.at[j];
    memcpy(rows.scales + j, codes + row - SCALE_BYTES, SCALE_BYTES);
    if (a.format == PageFormat::int8) {
      expand_codes<PageFormat::int8>(codes, size, out);
    } else {
      expand_codes<PageFormat::e4m3>(codes, size, out);
      rows.scales[j] *= 256;
    }
    rows.at[j] = out;
  }
  for (int j = count; j % KEYS_TOGETHER; j++) rows.at[j] = rows.at[count - 1], rows.scales[j] = 0;
}

// Keys and values of a block of codes; `room` takes [KEY_BLOCK][dim + value_dim].
template <class T>
static void expand_block(const Attention& a, const AttentionUnit& u, int head, int begin, int count, T* room, Rows<T>& keys, Rows<T>& values) {
  expand_rows(a, u, head, a.keys, a.key_row, a.dim, begin, count, room, keys);
  if (a.values == a.keys) values = keys;
  else expand_rows(a, u, head, a.values, a.value_row, a.value_dim, begin, count, room + KEY_BLOCK * a.dim, values);
}

}  // namespace ISA
