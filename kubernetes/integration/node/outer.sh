#!/usr/bin/env bash
# Holds a node from outside of its namespaces. It prints the process whose only child is the first
# one inside. When standard input ends, which a killed test also brings about, it ends the node, and
# removes its cgroups and its directory RUN. If a line says "keep", the logs stay.
#
# INNER is the script of the first process. CGROUP is where the node's cgroups are in each hierarchy.
set -uo pipefail
unshare -m -n -p -f --mount-proc --kill-child -- bash -c "$INNER" </dev/null >"$RUN/log/inner.log" 2>&1 &
outer=$!
echo "$outer"
exec >/dev/null
answer=
read -r answer
kill -9 $outer
wait $outer
mapfile -t cgroups < <(findmnt -n -o TARGET -t cgroup,cgroup2)
# The processes inside end after unshare, and only then can a cgroup be removed.
for ((i = 0; i < 600; i++)); do
	left=
	for cgroup in "${cgroups[@]/%/${CGROUP:?}}"; do
		[ -d "$cgroup" ] || continue
		left=1
		find "$cgroup" -depth -type d -exec rmdir {} \; 2>/dev/null
	done
	[ -n "$left" ] || break
	sleep 0.1
done
find "${RUN:?}" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf {} +
[ "$answer" = keep ] || rm -rf "$RUN"
