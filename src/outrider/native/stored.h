// Matrices whose blocks are still in their files. They give the same bits as packed ones: each panel
// is read and packed when it is multiplied, and forgotten. So a model answers before it is packed.
//
// Blocks are read, not mapped: that takes less time than the faults of fresh pages, and a file that
// is cut meanwhile is an error, not a signal.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"

namespace outrider {

// An open file; the descriptor is the caller's.
class StoredFile {
 public:
  explicit StoredFile(int descriptor);
  bool is(int descriptor) const { return descriptor == descriptor_; }
  bool holds(int64_t offset, int64_t bytes) const;
  // Zeros if the file cannot be read, which `is_sound` remembers.
  void read(char* out, size_t bytes, int64_t offset);
  bool is_sound() const;  // read without error, and not written to since it was opened

 private:
  struct State {
    int64_t size = -1, changed_s = 0, changed_ns = 0;
  };
  State state() const;
  int descriptor_;
  State opened_;
  std::atomic<bool> failed_{false};
};

// Rows of a row-major matrix and their outputs: source row r becomes output
// first + r / run * run_step + r % run (heads are padded, gate and up interleaved). The sixteen
// outputs of a panel come from one source.
struct PackSource {
  const char* data;  // or, in a file, null
  int32_t type;
  int rows, columns;
  int run;       // consecutive rows that stay together, e.g. a head or a panel
  int run_step;  // outputs from one run to the next
  int first;     // output of row 0
  int turned = 0;  // of a run: rows before this whose rotary pairs are neighbours
  StoredFile* file = nullptr;
  int64_t offset = 0;
};

struct Stored {
  Matrix* matrix;
  std::vector<PackSource> sources;
};

class StoredWeights {
 public:
  StoredFile* file(int descriptor);
  void add(Matrix& m, const PackSource& source);
  // Packs what is due before a pass over `rows` rows. False, also from the next, with an error set: a
  // file has changed.
  bool before_pass(int rows, int threads);
  bool pack(size_t bytes, int threads);  // at least so much of it
  bool is_sound() const;

 private:
  std::vector<std::unique_ptr<StoredFile>> files_;
  std::vector<std::unique_ptr<Stored>> matrices_;
  size_t total_ = 0;
  bool begun_ = false;
};

// w.kernels.gemm, also of stored matrices.
void multiply_panels(const Kernels& kernels, const Matrix& w, const Rows& x, int first,
                     int num_panels, float* c, ptrdiff_t ldc);

}  // namespace outrider
