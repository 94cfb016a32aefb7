# Runs test programs one after another from the repository's root and adds up what they say.
# The last line is "N passed, N failed"; a program that dies counts as one failure more.
passed=0 failed=0
for program in "$@"; do
    output=$(timeout 1800 "$program" --no-colors=true --no-intro=true 2>&1)
    status=$?
    line=$(printf '%s\n' "$output" | grep '^\[doctest\] test cases:' | tail -n 1)
    good=$(printf '%s\n' "$line" | sed -n 's/.*| *\([0-9]*\) passed.*/\1/p')
    bad=$(printf '%s\n' "$line" | sed -n 's/.*| *\([0-9]*\) failed.*/\1/p')
    [ -n "$line" ] && { [ "$status" = 0 ] || [ "${bad:-0}" -gt 0 ]; } || bad=$((${bad:-0} + 1))
    [ "$bad" = 0 ] || printf '%s\n' "$output"
    printf '%-28s %4d passed, %d failed\n' "$(basename "$program")" "${good:-0}" "$bad"
    passed=$((passed + ${good:-0})) failed=$((failed + bad))
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
