# Runs test programs from the repository's root, $JOBS at a time or one a core, and adds up what they say.
# The last line is "N passed, N failed"; a program that dies counts as one failure more.
if [ "$1" != --one ]; then
    counts=$(mktemp) leaks=$(mktemp)
    echo leak:libomp.so > "$leaks"  # clang's OpenMP keeps records of its threads that it never frees
    export LSAN_OPTIONS="suppressions=$leaks:print_suppressions=0"
    # Waiting threads sleep: a core that one spins on is missing to the program beside it.
    printf '%s\n' "$@" | COUNTS=$counts OMP_WAIT_POLICY=passive xargs -P "${JOBS:-$(nproc)}" -n 1 sh "$0" --one
    awk -v programs=$# '{ passed += $1; failed += $2 }
        END { failed += programs - NR; print passed + 0 " passed, " failed " failed"; exit failed > 0 }' "$counts"
    status=$?
    rm "$counts" "$leaks"
    exit $status
fi
program=$2 start=$(date +%s)
output=$(timeout 1800 "$program" --no-colors=true --no-intro=true 2>&1)
status=$?
line=$(printf '%s\n' "$output" | grep '^\[doctest\] test cases:' | tail -n 1)
good=$(printf '%s\n' "$line" | sed -n 's/.*| *\([0-9]*\) passed.*/\1/p')
bad=$(printf '%s\n' "$line" | sed -n 's/.*| *\([0-9]*\) failed.*/\1/p')
[ -n "$line" ] && { [ "$status" = 0 ] || [ "${bad:-0}" -gt 0 ]; } || bad=$((${bad:-0} + 1))
[ "$bad" = 0 ] || printf '%s\n' "$output"
printf '%-28s %4d passed, %d failed, %4d s\n' "$(basename "$program")" "${good:-0}" "$bad" $(($(date +%s) - start))
echo "${good:-0} $bad" >> "$COUNTS"
