// Two sequences that share one pool of pages, without a model: what their page tables say (06_where_a_row_lives.md).
//   g++ -std=c++17 -I. docs/two_sequences.cpp -o two && ./two
#include "cache.h"

int main() {
    CacheShape shape;
    shape.layers = 1, shape.kv_heads = 2, shape.key_width = shape.value_width = 4;
    shape.sequences = 2, shape.capacity = 64, shape.page = 4;
    Cpu cpu(1);
    Cache cache = open_cache(cpu, {shape}, Paged{}, BF16{}, BF16{});
    const Paged &paged = std::get<Paged>(cache.stores[0].layout);
    auto show = [&](const char *when) {
        printf("%s\n", when);
        for (int sequence = 0; sequence < 2; sequence++) {
            printf("  sequence %d, %2d positions, table", sequence, cache.lengths[sequence]);
            for (int i = 0; i < pages_for(cache.lengths[sequence], paged.page); i++)
                printf(" %d", paged.table[sequence * paged.pages_per_sequence + i]);
            printf("\n");
        }
    };
    grow(cache, 0, 6), grow(cache, 1, 3);  // two prompts
    show("both prompts are read");
    for (int i = 0; i < 7; i++) grow(cache, 0, 1), grow(cache, 1, 1);
    show("both have decoded 7 tokens");
    rewind(cache, 0, 0), grow(cache, 1, 9), grow(cache, 0, 5);
    show("sequence 0 ended, 1 went on by 9, a new 0 has begun");
    printf("position 6 of sequence 1 is in row %lld\n", (long long)row_of(cache.stores[0], 1, 6));
}
