#!/bin/sh
# timed.sh MESSAGE COMMAND…: runs the command and shows the elapsed time.
# On a terminal the seconds are updated in place; elsewhere a line is printed every TIMED_EACH_S
# seconds (default 15). The command's output is kept in a file and shown only if it fails.
set -eu

message=$1
shift
each_s=${TIMED_EACH_S:-15}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
started=$(date +%s)
elapsed() { echo $(($(date +%s) - started)); }

trap 'kill "$!" 2>/dev/null; wait; exit 130' INT TERM HUP
"$@" >"$log" 2>&1 &
command=$!

[ -t 1 ] || echo "$message …"
printed=0
while kill -0 "$command" 2>/dev/null; do
  now=$(elapsed)
  if [ -t 1 ]; then
    printf '\r%s … %s s ' "$message" "$now"
  elif [ $((now - printed)) -ge "$each_s" ]; then
    echo "$message … $now s"
    printed=$now
  fi
  sleep 0.5
done

status=0
wait "$command" || status=$?
[ -t 1 ] && printf '\r'
if [ "$status" -eq 0 ]; then
  echo "$message: done in $(elapsed) s"
else
  echo "$message: failed after $(elapsed) s" >&2
  cat "$log" >&2
fi
exit "$status"
