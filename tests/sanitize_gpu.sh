# Runs the tests of the kernels on a card under compute-sanitizer: bad accesses, races in shared memory, memory that is
# read before it is written, barriers that not all threads reach. The last line is "N passed, N failed".
#   sh tests/sanitize_gpu.sh build/gpu/test_cuda_layers ...
# TOOLS="memcheck" takes one of them; ONLY="layouts*" the test cases whose name begins so.
passed=0 failed=0
command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer: not found; it comes with the CUDA toolkit, in its bin folder"
    exit 2
}
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
    for program in "$@"; do
        log=build/gpu/$(basename "$program").$tool.txt
        if compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" --no-intro=true ${ONLY:+-tc="$ONLY"} \
            >"$log" 2>&1; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            tail -n 40 "$log"
        fi
        printf '%-12s %-24s %s\n' "$tool" "$(basename "$program")" "$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$log" | tail -n 1)"
    done
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
