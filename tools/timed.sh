#!/bin/sh
# timed.sh MESSAGE COMMAND…: runs the command and says for how long it has been at it.
# On a terminal the seconds count up in place; elsewhere there is a line now and then. What the
# command prints is kept in a file and shown only if it fails.
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
told=0
while kill -0 "$command" 2>/dev/null; do
  now=$(elapsed)
  if [ -t 1 ]; then
    printf '\r%s … %s s ' "$message" "$now"
  elif [ $((now - told)) -ge "$each_s" ]; then
    echo "$message … $now s"
    told=$now
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
