// Who wrote and who read which word of shared memory, and what barrier has been passed since.
//
// A thread may read what another of its warp wrote, and write over what another of its warp read,
// after a barrier of the warp. Between warps it takes the CTA's, or a chain of others (a
// warpgroup's, phases of `emu_bulk.h`): each warp knows up to what time of every other one it has
// heard. That warp operations meet is no such promise on a GPU, but that a matrix load has read
// for all lanes is. The copy engine and the warpgroup products also need the writer's `fence`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace wr::emu {

using Times = std::vector<uint32_t>;  // by warp

class SharedWrites {
  public:
    void reset(size_t bytes, unsigned threads) {
        words_.assign((bytes + 3) / 4, Word{});
        read_.assign(words_.size() * (threads / 32), 0);
        recent_.assign(threads / 32, {});
        since_cta_.clear();
        now_.assign(threads / 32, 1);
        heard_.assign(threads / 32, Times(threads / 32, 0));
        fenced_.assign(threads, 0);
        writes_ = 0;
    }

    void write(unsigned thread, size_t offset, size_t bytes) {
        writes_++;
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            Word& at = words_[word];
            at.writer = static_cast<int16_t>(thread);
            at.since = Since::NOTHING;
            at.written = now_[thread / 32];
            at.number = writes_;
            touched(thread / 32, word);
        }
    }

    // `reader` ALL: a matrix load of `warp`.
    void read(int reader, unsigned warp, size_t offset, size_t bytes) {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            Word& at = words_[word];
            int own = static_cast<int>(warp);
            auto times = read_.begin() + static_cast<ptrdiff_t>(word * now_.size());
            if (at.reading_warp == NOBODY) std::fill_n(times, now_.size(), 0);
            times[warp] = now_[warp];
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
        heard_[warp][warp] = now_[warp]++;
    }

    void sync_cta() {
        for (size_t word : since_cta_) words_[word].settle();
        since_cta_.clear();
        for (auto& words : recent_) words.clear();
    }

    // `warp` tells what it has done up to its last barrier, and what it has heard of.
    void tell(unsigned warp, Times& times) const {
        times.resize(now_.size());
        for (size_t n = 0; n < times.size(); n++) times[n] = std::max(times[n], heard_[warp][n]);
    }
    void hear(unsigned warp, const Times& times) {
        for (size_t n = 0; n < times.size(); n++)
            heard_[warp][n] = std::max(heard_[warp][n], times[n]);
    }

    // The thread whose write `reader` (of `warp`) must not see yet, or -1.
    int unsynced(int reader, unsigned warp, size_t offset, size_t bytes) const {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            const Word& at = words_[word];
            if (at.since == Since::CTA) continue;
            unsigned writer = static_cast<unsigned>(at.writer) / 32;
            bool is_late = at.since == Since::NOTHING && at.writer != reader;
            if (writer == warp ? is_late : at.written > heard_[warp][writer]) return at.writer;
        }
        return -1;
    }

    // Whether others than `thread` may not have read yet what it is about to write over.
    bool is_read(unsigned thread, size_t offset, size_t bytes) const {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            const Word& at = words_[word];
            if (at.reading_warp == NOBODY) continue;
            unsigned own = thread / 32;
            bool is_own = at.reading_warp == static_cast<int>(own);
            if (is_own && at.reader != NOBODY && at.reader != static_cast<int>(thread))
                return true;
            for (size_t warp = 0; !is_own && warp < now_.size(); warp++)
                if (read_[word * now_.size() + warp] > heard_[own][warp]) return true;
        }
        return false;
    }

    void fence(unsigned thread) { fenced_[thread] = writes_; }

    // The thread that wrote here with no fence since, or -1.
    int unfenced(size_t offset, size_t bytes) const {
        for (size_t word = offset / 4; word * 4 < offset + bytes; word++) {
            const Word& at = words_[word];
            if (at.number > fenced_[static_cast<size_t>(at.writer)]) return at.writer;
        }
        return -1;
    }

    static constexpr int ALL = -1;

  private:
    static constexpr int NOBODY = -1, SEVERAL = -2;
    enum class Since : uint8_t { NOTHING, WARP, CTA };
    struct Word {
        int16_t writer = 0, reader = NOBODY;
        int8_t reading_warp = NOBODY;
        Since since = Since::CTA;             // the write
        uint32_t written = 0;                 // time of the writing warp
        uint32_t number = 0;                  // of the write

        void settle() {
            reader = NOBODY;
            reading_warp = NOBODY;
            since = Since::CTA;
        }
    };

    void touched(unsigned warp, size_t word) {
        recent_[warp].push_back(word);
        since_cta_.push_back(word);
    }

    std::vector<Word> words_;
    Times read_;  // by word and warp: when it read last; holds where anybody did
    std::vector<std::vector<size_t>> recent_;  // by warp, since its last barrier
    std::vector<size_t> since_cta_;
    Times now_;                // barriers of each warp
    std::vector<Times> heard_;  // by warp, of the others
    std::vector<uint32_t> fenced_;  // by thread: the last write before its fence
    uint32_t writes_ = 0;
};

}  // namespace wr::emu
