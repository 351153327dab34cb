// The kernels of one ISA. Compiled once for each, with -DISA=<its name>: see build.py.
#include "kernels.h"

#include "attention.h"
#include "conv.h"
#include "delta.h"
#include "gate.h"
#include "keep.h"
#include "low_rank.h"
#include "prepare.h"
#include "product.h"
#include "rotary.h"
#include "ssd.h"
#include "weights.h"

#define NAME_(isa) #isa
#define NAME(isa) NAME_(isa)
#define TABLE_(isa) kernels_##isa
#define TABLE(isa) TABLE_(isa)

const Kernels* TABLE(ISA)() {
  static const Kernels table = {NAME(ISA), ISA::HAS_BF16, ISA::rest, ISA::prepare, ISA::normalise_row, ISA::prepare_panel, ISA::product, ISA::gate, ISA::rotate, ISA::keep, ISA::attend, ISA::join, ISA::weights, ISA::convolve, ISA::delta_rule, ISA::run_state, ISA::narrow, ISA::widen};
  return &table;
}
