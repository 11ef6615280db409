#!/usr/bin/env bash
# The whole set-up, in a folder of its own (.venv), and everything there is to run:
#   ./run.sh             train on real text and check against one device
#   ./run.sh test        the tests, about five minutes;  ./run.sh test full   all, within an hour
#   ./run.sh test campaign   every layout of the lattice, hundreds of random ones, of kills: hours
#   ./run.sh 04 --help   one chapter, with its arguments;  ./run.sh all   every one, and a table
#   ./run.sh bench       beside PyTorch's own, all rows, or those whose names begin as you say
#   ./run.sh scaling     strong and weak scaling on this machine, and where the time goes
set -euo pipefail
cd "$(dirname "$0")"

if ! cmp -s requirements.txt .venv/installed; then
    python3 -m venv .venv
    # Not compiled here: Python compiles what is imported, a small part, and keeps it.
    .venv/bin/pip install --quiet --no-compile --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed
fi
export OMP_NUM_THREADS=1 # ranks share the cores

run() {
    echo "+ python $*"
    .venv/bin/python "$@"
}

main_job() {
    run 09_combined_5d.py --model tiny-moe --dp 2 --pp 2 --cp 2 --tp 2 --ep 4 --zero 1 \
        --batch 8 --micro-batch 2 --steps 40 --check
}

chapter() {
    if [ "$1" = 09_combined_5d.py ]; then main_job; else run "$1"; fi
}

case "${1:-}" in
"") main_job ;;
test)
    case "${2:-}" in full | campaign) set -- test "--$2" ;; esac
    # Two processes share the tests: one alone leaves a core idle for much of the time.
    share=$(mktemp -d)
    trap 'kill $! 2>/dev/null || true; rm -r "$share"' EXIT
    run -m pytest -q tests --share "$share" "${@:2}" >"$share/second" 2>&1 &
    failed=0
    run -m pytest -q tests --share "$share" "${@:2}" || failed=1
    wait $! || failed=1
    cat "$share/second"
    exit $failed
    ;;
all)
    log=$(mktemp) ends=() failed=0
    for file in [0-9][0-9]_*.py; do
        begin=$SECONDS
        chapter "$file" | tee "$log" || failed=1
        ends+=("$(printf '%4d s   %-20s%s' $((SECONDS - begin)) "$file" "$(tail -n 1 "$log")")")
    done
    rm "$log"
    printf '%s\n' "" "${ends[@]}"
    exit $failed
    ;;
bench) run tests/bench.py "${@:2}" ;;
scaling) run tests/scaling.py ;;
[0-9][0-9])
    run "$1"_*.py "${@:2}"
    ;;
*)
    sed -n '2,8p' "$0" >&2
    exit 2
    ;;
esac
