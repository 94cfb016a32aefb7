// Both tests of layers of several kinds without fast/: what the story alone makes of them, as ./llm-plain has them.
#define PLAIN
#include "test_kinds.cpp"
#include "test_kinds_back.cpp"
