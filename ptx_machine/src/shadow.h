// What is kept about bytes of memory: the last write, and the reads since.
//
// A line of 16 bytes has one cell, as long as all accesses cover the whole of it; it is parted into words
// of four bytes, and these into bytes, where they do not.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "order.h"
#include "storage.h"

namespace ptx_machine {

struct Cell {
  Access write;
  std::array<Access, 2> reads;  // since then, by two agents
  std::uint32_t readers = 0;    // the others: number of a Readers, or 0
  std::uint32_t parts = 0;      // number of four cells in its place, or 0
};

// Reads that are not ordered among each other. Where there are more, some are forgotten: a race with
// these is missed.
struct Readers {
  static constexpr std::size_t kMost = 8;
  std::array<Access, kMost> reads;
  std::size_t count = 0;
};

class Shadow {
 public:
  static constexpr std::uint64_t kLine = 16;

  explicit Shadow(std::uint64_t bytes) : lines_((bytes + kLine - 1) / kLine) {}

  // Calls f(cell, begin, bytes) for the cells that make up [begin, end).
  template <class F>
  void visit(std::uint64_t begin, std::uint64_t end, F&& f) {
    for (std::uint64_t line = begin / kLine; line * kLine < end; ++line) {
      const std::uint64_t first = line * kLine;
      const auto from = static_cast<std::uint32_t>(std::max(begin, first) - first);
      const auto to = static_cast<std::uint32_t>(std::min(end, first + kLine) - first);
      Cell& cell = lines_[line];
      if (cell.parts == 0 && from == 0 && to == kLine) {
        f(cell, first, static_cast<std::uint32_t>(kLine));
      } else {
        visit_cell(cell, kLine, from, to, first, f);
      }
    }
  }

  // Says that the cell at a place is visited soon.
  void expect(std::uint64_t at) const {
    const std::uint64_t line = at / kLine;
    if (line < lines_.size()) __builtin_prefetch(&lines_[line], 1);
  }

  // After a write to [begin, end): parts of a line that are the same become one again.
  void unite(std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t line = (begin + kLine - 1) / kLine; (line + 1) * kLine <= end; ++line) {
      Cell& cell = lines_[line];
      if (cell.parts == 0) continue;
      const Access write = first_of(cell).write;
      clear(cell);
      cell.write = write;
    }
  }

  Readers& readers(Cell& cell) {
    if (cell.readers == 0) {
      if (free_readers_.empty()) {
        readers_.emplace_back();
        free_readers_.push_back(static_cast<std::uint32_t>(readers_.size()));
      }
      cell.readers = free_readers_.back();
      free_readers_.pop_back();
      readers_[cell.readers - 1].count = 0;
    }
    return readers_[cell.readers - 1];
  }
  void forget_reads(Cell& cell) {
    cell.reads = {};
    if (cell.readers == 0) return;
    free_readers_.push_back(cell.readers);
    cell.readers = 0;
  }

 private:
  using Parts = std::array<Cell, 4>;

  const Cell& first_of(const Cell& cell) const {
    return cell.parts == 0 ? cell : first_of(parts_[cell.parts - 1][0]);
  }

  void clear(Cell& cell) {
    forget_reads(cell);
    if (cell.parts == 0) return;
    for (Cell& part : parts_[cell.parts - 1]) clear(part);
    free_parts_.push_back(cell.parts);
    cell.parts = 0;
  }

  void part(Cell& cell) {
    if (free_parts_.empty()) {
      parts_.emplace_back();
      free_parts_.push_back(static_cast<std::uint32_t>(parts_.size()));
    }
    const std::uint32_t number = free_parts_.back();
    free_parts_.pop_back();
    for (Cell& one : parts_[number - 1]) {
      one = {};
      one.write = cell.write;
      one.reads = cell.reads;
      if (cell.readers != 0) {
        const Readers copy = readers_[cell.readers - 1];
        readers(one) = copy;
      }
    }
    cell.parts = number;
    forget_reads(cell);
  }

  template <class F>
  void visit_cell(Cell& cell, std::uint32_t size, std::uint32_t from, std::uint32_t to,
                  std::uint64_t at, F&& f) {
    if (cell.parts == 0) {
      if (from == 0 && to == size) {
        f(cell, at, size);
        return;
      }
      part(cell);
    }
    const std::uint32_t bytes = size / 4;
    Parts& parts = parts_[cell.parts - 1];
    for (std::uint32_t i = from / bytes; i * bytes < to; ++i) {
      const std::uint32_t first = i * bytes;
      visit_cell(parts[i], bytes, std::max(from, first) - first,
                 std::min(to, first + bytes) - first, at + first, f);
    }
  }

  Storage<Cell> lines_;
  std::deque<Parts> parts_;
  std::vector<std::uint32_t> free_parts_;
  std::deque<Readers> readers_;
  std::vector<std::uint32_t> free_readers_;
};

}  // namespace ptx_machine
