// Crews of threads; library.cpp takes one for each call.
#pragma once
#include "team.h"

namespace pf {

// A caller's crew of `size` threads, itself among them, for as long as this lives; calls at the same time get
// different ones. Crews stay for the next call, asleep.
class Hired {
  public:
    explicit Hired(int32_t size);
    ~Hired();
    Hired(const Hired&) = delete;
    Hired& operator=(const Hired&) = delete;
    Team team() const { return {crew_, size_}; }

  private:
    Crew* crew_;
    int32_t size_;
};

}  // namespace pf
