// Who wrote and who read which word of shared memory, and what barrier has been passed since.
//
// A thread may read what another of its warp wrote, and write over what another of its warp read,
// after a barrier of the warp; between warps it takes the CTA's. That warp operations meet is no
// such promise on a GPU, but that a matrix load has read for all lanes is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wr::emu {

class SharedWrites {
  public:
    void reset(size_t bytes, unsigned threads) {
        words_.assign((bytes + 3) / 4, Word{});
        recent_.assign(threads / 32, {});
        since_cta_.clear();
    }

    void write(unsigned thread, size_t offset, size_t bytes) {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            words_[word].writer = static_cast<int16_t>(thread);
            words_[word].since = Since::NOTHING;
            touched(thread / 32, word);
        }
    }

    // `reader` ALL: a matrix load of `warp`.
    void read(int reader, unsigned warp, size_t offset, size_t bytes) {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            Word& at = words_[word];
            int own = static_cast<int>(warp);
            at.reading_warp = static_cast<int8_t>(
                at.reading_warp == NOBODY || at.reading_warp == own ? own : SEVERAL);
            if (reader != ALL)
                at.reader = static_cast<int16_t>(
                    at.reader == NOBODY || at.reader == reader ? reader : SEVERAL);
            touched(warp, word);
        }
    }

    void sync_warp(unsigned warp) {
        for (size_t word : recent_[warp]) {
            Word& at = words_[word];
            if (at.since == Since::NOTHING && at.writer / 32 == static_cast<int>(warp))
                at.since = Since::WARP;
            if (at.reading_warp == static_cast<int>(warp)) at.reader = NOBODY;
        }
        recent_[warp].clear();
    }

    void sync_cta() {
        for (size_t word : since_cta_) words_[word] = Word{};
        since_cta_.clear();
        for (auto& words : recent_) words.clear();
    }

    // The thread whose write `reader` (of `warp`) must not see yet, or -1.
    int unsynced(int reader, unsigned warp, size_t offset, size_t bytes) const {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            const Word& at = words_[word];
            bool is_late = at.since == Since::NOTHING && at.writer != reader;
            bool is_foreign = at.since != Since::CTA && at.writer / 32 != static_cast<int>(warp);
            if (is_late || is_foreign) return at.writer;
        }
        return -1;
    }

    // Whether others than `thread` may not have read yet what it is about to write over.
    bool is_read(unsigned thread, size_t offset, size_t bytes) const {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            const Word& at = words_[word];
            if (at.reading_warp == NOBODY) continue;
            if (at.reading_warp != static_cast<int>(thread / 32)) return true;
            if (at.reader != NOBODY && at.reader != static_cast<int>(thread)) return true;
        }
        return false;
    }

    static constexpr int ALL = -1;

  private:
    static constexpr int NOBODY = -1, SEVERAL = -2;
    enum class Since : uint8_t { NOTHING, WARP, CTA };
    struct Word {
        int16_t writer = 0, reader = NOBODY;
        int8_t reading_warp = NOBODY;
        Since since = Since::CTA;  // the write
    };

    void touched(unsigned warp, size_t word) {
        recent_[warp].push_back(word);
        since_cta_.push_back(word);
    }

    std::vector<Word> words_;
    std::vector<std::vector<size_t>> recent_;  // by warp, since its last barrier
    std::vector<size_t> since_cta_;
};

}  // namespace wr::emu
