// Reads blocks of files, and decides when they are packed.
#include "stored.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "model.h"

namespace outrider {
namespace {
constexpr size_t kShares = 4;  // the passes that pack
}

StoredFile::StoredFile(int descriptor) : descriptor_(descriptor), opened_(state()) {}

StoredFile::State StoredFile::state() const {
  struct stat found;
  if (fstat(descriptor_, &found) != 0) return {};
#if defined(__APPLE__)
  const timespec changed = found.st_mtimespec;
#else
  const timespec changed = found.st_mtim;
#endif
  return {found.st_size, changed.tv_sec, changed.tv_nsec};
}

bool StoredFile::holds(int64_t offset, int64_t bytes) const {
  return offset >= 0 && bytes >= 0 && bytes <= opened_.size - offset;
}

void StoredFile::read(char* out, size_t bytes, int64_t offset) {
  while (bytes > 0) {
    const ssize_t got = pread(descriptor_, out, bytes, off_t(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      failed_.store(true);
      memset(out, 0, bytes);
      return;
    }
    out += got, bytes -= size_t(got), offset += got;
  }
}

bool StoredFile::is_sound() const {
  const State now = state();
  return !failed_.load() && now.size >= 0 && now.size == opened_.size &&
         now.changed_s == opened_.changed_s && now.changed_ns == opened_.changed_ns;
}

StoredFile* StoredWeights::file(int descriptor) {
  for (auto& f : files_)
    if (f->is(descriptor)) return f.get();
  files_.push_back(std::make_unique<StoredFile>(descriptor));
  return files_.back().get();
}

void StoredWeights::add(Matrix& m, const PackSource& source) {
  if (!m.stored) {
    matrices_.push_back(std::make_unique<Stored>(Stored{&m, {}}));
    m.stored = matrices_.back().get();
    total_ += size_t(m.panels) * m.panel_bytes();
  }
  m.stored->sources.push_back(source);
}

bool StoredWeights::is_sound() const {
  for (auto& f : files_)
    if (!f->is_sound()) return set_error("the file of the weights has changed; load the model again");
  return true;
}

// The first pass answers at once, and each of the next waits for a share. A pass of several row
// blocks would read a panel for each.
bool StoredWeights::before_pass(int rows, int threads) {
  if (matrices_.empty()) return true;
  const size_t share = begun_ ? total_ / kShares + 1 : 0;
  begun_ = true;
  return pack(rows > kRowBlock ? total_ : share, threads);
}

// The embedding, which came first, is packed last: a pass reads few rows of it.
bool StoredWeights::pack(size_t bytes, int threads) {
  if (!is_sound()) return false;
  for (size_t done = 0; done < bytes && !matrices_.empty(); matrices_.pop_back()) {
    const Stored& s = *matrices_.back();
    for (const PackSource& source : s.sources) pack_blocks(*s.matrix, source, threads);
    if (!is_sound()) return false;
    s.matrix->stored = nullptr;
    done += size_t(s.matrix->panels) * s.matrix->panel_bytes();
  }
  if (matrices_.empty()) files_.clear();
  return true;
}

void multiply_panels(const Kernels& kernels, const Matrix& w, const Rows& x, int first,
                     int num_panels, float* c, ptrdiff_t ldc) {
  if (!w.stored) return kernels.gemm(w, x, first, num_panels, c, ldc);
  Matrix one = w;
  for (int p = 0; p < num_panels; ++p) {
    one.data = panel_of(w, first + p);
    kernels.gemm(one, x, 0, 1, c + p * kLanes, ldc);
  }
}

}  // namespace outrider
