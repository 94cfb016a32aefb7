// The table of test_twins.cpp for the CPU: plain and fast, compiled without the sanitizers that emulated kernels need.
#define TWINS_OF_CPU
#include "test_twins.cpp"
