// test_kinds.cpp without fast/: what the story alone makes of layers of several kinds, as ./llm-plain has them.
#define PLAIN
#include "test_kinds.cpp"
