// What every ISA provides. One table is chosen at run time: see dispatch.cc.
#pragma once
#include <stdint.h>

#include "formats.h"

constexpr int PANEL_ROWS = 64;  // activation rows that pass by the same weights
constexpr int PANEL_COLUMNS = 2 * ROWS;

// 32 activations of one row as x = scale * code.
struct RowBlock {
  float scale;
  float scaled_sum;          // scale * sum of codes
  int32_t negative_sum;      // -sum of codes
  int32_t negative_sum_16;   // the same of the first 16 codes
};

// Rows of activations, in panels, as products want them; what no matrix of the call needs is null. Products with AMX read up to 15
// rows past a panel's last, whose products go nowhere.
struct Activations {
  int inputs;         // padded to blocks of 32
  int panel_rows;     // that there is room for in a panel, at most PANEL_ROWS
  int8_t* codes;      // [panels][blocks][panel_rows][32]
  RowBlock* blocks;   // [panels][blocks][panel_rows]
  float* values;      // [panels * panel_rows][inputs]
  uint16_t* halves;   // the same, bf16; on AMX as codes lie

  // Where a row's block of 32 inputs lies among codes.
  MEMBER int64_t place(int row, int block) const { return (int64_t(row / panel_rows) * (inputs / BLOCK) + block) * panel_rows + row % panel_rows; }
};

// One row before that: `size` inputs (x is f32, or bf16 bits), perhaps normalised.
struct Row {
  const void* x;
  bool is_bf16;
  int size;
  const float* norm;   // [size] weight of an RMS norm; null for none
  float epsilon, weight_offset;
};

enum class Activation : int { silu, gelu_tanh, gelu, relu, relu2, count };

// What happens to heads of queries and keys before they attend.
struct HeadInput {
  bool is_bf16;
  int dim;
  float epsilon, weight_offset;  // of an RMS norm
  const float *cos, *sin;        // [tokens, half]; null: nothing is rotated
  int half;                      // pairs of channels that are rotated
  bool interleaved;              // pairs are neighbours, not `half` apart
};

// How a row of a page, one token's key or value of one head, is kept: as floats, as the bits of bf16, or as codes, integers
// or e4m3, with a scale behind them, a float in as many bytes as SCALE_BYTES.
enum class PageFormat : int { f32, bf16, int8, e4m3 };

constexpr int SCALE_BYTES = 4;

MEMBER static inline constexpr bool is_coded(PageFormat format) { return format >= PageFormat::int8; }
MEMBER static inline constexpr int element_bytes(PageFormat format) { return format == PageFormat::f32 ? 4 : format == PageFormat::bf16 ? 2 : 1; }

// One call of paged attention; see jaxllm/pallas_kernels/kernels.py for what it computes.
struct Attention {
  const void* q;  // [tokens, heads, dim]
  bool q_is_bf16;
  int heads, kv_heads, dim, value_dim;
  // Pages [pages, kv heads, page_size, row]; a row's length counts its scale. Values may be the first channels of the keys.
  const void *keys, *values;
  PageFormat format;
  int page_size, key_row, value_row;
  const int32_t* page_table;  // [sequences, columns]
  int columns;
  float scale, softcap;  // softcap 0: none
  int window;            // 0: none
  bool chunked;          // keys are those from the last multiple of the window on
  const float* sinks;    // [heads], or null
  const float* slopes;   // [heads], or null: what logits fall by with each key of distance
  const int32_t* until = nullptr;  // [tokens], or null: the last key that each sees, if that may be a later one

  // The first and the last key that a token at a position sees.
  MEMBER int lowest_key(int position) const {
    if (!window || position < window) return 0;
    return chunked ? position - position % window : position - window + 1;
  }
  MEMBER int highest_key(int token, int position) const { return until && until[token] > position ? until[token] : position; }
  MEMBER int64_t scratch_bytes() const;
};

constexpr int MAX_VECTORS = 64;  // query vectors that attend to the same keys together
constexpr int KEY_BLOCK = 64;    // keys that they visit at a time
constexpr int SEGMENT = 256;     // keys whose softmax is computed by itself; see attention.h

// What one unit works with, wherever its inputs come from.
MEMBER inline int64_t Attention::scratch_bytes() const { return int64_t(sizeof(float)) * (MAX_VECTORS + KEY_BLOCK) * (2 * dim + 2 * value_dim + 96); }

// Some query vectors of one run of tokens, over a range of keys: of one KV head and several tokens (vector `i` is query
// head `i % group` of token `token + i / group`, where group = heads / kv_heads), or of one token and several KV heads.
struct AttentionUnit {
  int sequence;
  int kv_head, kv_heads;  // the first, and how many: one, unless this is decode
  int token, position;    // first of the run
  int first, count;       // vectors
  int key_begin, key_end;
  bool sinks;             // this range starts with the sinks
  bool decode;            // the run has one token; its keys are of one segment

  MEMBER int head(int r, int group) const { return kv_head * group + (decode ? first + r : (first + r) % group); }
  MEMBER int token_of(int r, int group) const { return decode ? token : token + (first + r) / group; }
};

// One run of tokens through the state of one head of a state-space dual; see jaxllm/pallas_kernels/ssd.py.
struct StateRun {
  int tokens, dim, size;
  int heads, groups;       // between tokens
  const float* x;          // [tokens, heads, dim], from this head on
  const float* dt;         // [tokens, heads], likewise
  const float *b, *c;      // [tokens, groups, size], from the head's group on
  float a, skip;
  float* state;            // [dim, size]
  float* y;                // [tokens, heads, dim], from this head on
  float* kept;
  int kept_length;         // see Sequences
};

// The sequences of a step, one run of tokens each, and the rows of a buffer that their states lie in.
struct Sequences {
  int count;
  const int32_t* start;        // [count + 1] the first token of each run
  const int32_t* row;          // [count] the state before the run, and after it
  const int32_t* kept_row;     // the state after `kept_length` tokens of the run, where that is not 0
  const int32_t* kept_length;
};

// One call of a causal depthwise convolution.
struct Convolution {
  const void* x;  // [tokens, channels]
  bool is_bf16;
  int channels, taps;
  const float *weights, *bias;  // [channels, taps], and [channels] or null
  bool silu;
  float* states;  // [rows, taps - 1, channels]
  float* out;     // [tokens, channels]
};

constexpr int DELTA_COLUMNS = 32;  // of a head's state, which are run by themselves

// One run of tokens by the gated delta rule: up to DELTA_COLUMNS columns of one value head.
struct DeltaRun {
  int tokens, columns;
  int key_dim, value_dim, value_heads;
  const float *q, *k;     // [tokens, keys, key_dim] normalised, of this head
  int64_t keys;           // between tokens
  const float* v;         // of the head and columns
  int64_t channels;       // between tokens
  const float *decay, *beta;  // [tokens, value_heads], from this head on
  float* out;             // [tokens, value_heads, value_dim], from the head's columns on
  float *state, *kept;    // [key_dim, value_dim], from these columns on
  int kept_length;        // see Sequences
};

// Some tokens whose products one adapter adds to; see jaxllm/pallas_kernels/low_rank.py.
struct AdapterRun {
  const int32_t* tokens;    // [count] their rows in x, scales and out
  int count;
  const float* x;           // [all tokens, stride], of which the first `inputs`
  int inputs, stride;
  const uint16_t *a, *b;    // bf16 [ranks, inputs] and [rank, outputs]
  const uint16_t* gain;     // bf16 [outputs], what the product itself is multiplied by and added; null for none
  int ranks, rank;          // of the tables: of all parts of the product, and of one
  const int32_t* own_ranks; // [parts] of the adapter, behind which nothing is read; 0 of parts that it leaves alone
  int outputs;              // of all parts
  float* inner;             // [count, ranks]
  const float* scales;      // of the adapter, `places` apart
  int places;

  MEMBER float scale(int i) const { return scales[int64_t(tokens[i]) * places]; }
  MEMBER int own_rank(int part) const { return own_ranks[part] < rank ? own_ranks[part] : rank; }
};

// One part of a product, to which adapters add.
struct Target {
  float* out;        // [tokens from `row` on, stride]
  int row, stride;
  int before, part;  // outputs of the parts before it, and their number
  // The product itself of the columns that are widened, of the same rows [stride of its own]; null where no adapter has a gain.
  const float* base;
  int base_stride;
};

struct Kernels {
  const char* name;
  bool has_bf16;  // bf16 products take `halves`, not `values`
  // Gives back what the processor keeps for a thread that has no more units of a phase.
  void (*rest)();
  // Writes row `row` of the activations. `scratch` has room for `inputs` floats.
  void (*prepare)(const Row&, const Activations&, int row, float* scratch);
  // The same by itself, [size] floats, or bits of bf16 where the row has those: `centred` less its mean first, and with `bias` after
  // it, unless that is null. `scratch` has room for as many floats.
  void (*normalise)(const Row&, bool centred, const float* bias, void* out, float* scratch);
  // Writes a block of 32 inputs, a panel's columns [count][PANEL_COLUMNS], to the activations' rows from `row` on.
  void (*prepare_panel)(const float* panel, int count, const Activations&, int row, int block);
  // Rows [row, row + count) of one panel by `groups` (1 or 2) groups of a matrix -> out [count][PANEL_COLUMNS].
  void (*product)(const Matrix&, const Activations&, int row, int count, int group, int groups, float* out);
  // gate = activation(gate) * up, [count][PANEL_COLUMNS]
  void (*gate)(Activation, int count, float* gate, const float* up);
  // One head of one token as floats, normalised with `norm` (or null) and rotated.
  void (*rotate)(const HeadInput&, const void* x, int token, const float* norm, float* out);
  // Stores `count` channels, floats or bf16 bits, as a row of a page; zero for what is not finite.
  void (*keep)(const void* x, bool is_bf16, int count, void* row, PageFormat);
  // out [count][value_dim] gets the values' sums, `softmax` [count][2] the greatest logit, of base two, and the sum of weights, by
  // which the sums are yet to be divided. What the `next` unit reads first is fetched ahead of it; null for none. `scratch` has
  // Attention::scratch_bytes.
  void (*attend)(const Attention&, const AttentionUnit&, const AttentionUnit* next, float* out, float* softmax, uint8_t* scratch);
  // Adds what `attend` made of a later segment, `more`, to what it made of all segments before that: `vectors` of `dim` channels.
  void (*join)(const float* more, const float* more_softmax, int vectors, int dim, float* out, float* softmax);
  // The sum of exp(x - most) over `count` numbers that are at least `threshold`; each goes to `out` unless that is null.
  float (*weights)(const float* x, int count, float most, float threshold, float* out);
  // Channels [first, first + count) of all sequences. `taps` has room for as many floats as they have taps, and LANES more a tap.
  void (*convolve)(const Convolution&, const Sequences&, int first, int count, float* taps);
  // `tile` has room for [key_dim, DELTA_COLUMNS].
  void (*delta_rule)(const DeltaRun&, float* tile);
  // Moves a state on, token by token, and writes what each of them reads.
  void (*run_state)(const StateRun&);
  // What an adapter makes of the tokens' inputs, times their scales: `rows` of its ranks from the first on.
  void (*narrow)(const AdapterRun&, int first_row, int rows);
  // Adds what it makes of that, and its gain of the product itself, to one part of the product: `columns` of its outputs from the
  // first on.
  void (*widen)(const AdapterRun&, const Target&, int first, int columns);
};

// What differs between processors of one ISA. AMD's read weights fastest in one stream: group by group while rows are few, and
// without fetching from L2 into L1, which takes the places of fetches from memory. Intel's would be held up by their loads.
extern bool reads_by_group;

const Kernels* kernels_portable();
#if defined(__x86_64__)
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_amx();
#elif defined(__aarch64__)
const Kernels* kernels_neon();
const Kernels* kernels_neon_i8mm();
#endif
