#!/usr/bin/env bash
# Runs a test binary, for `go test -exec 'scripts/limit.sh LIMIT'`. A package that has not ended after
# LIMIT ends with the stacks of its goroutines. Those below integration have the limit of go test:
# they run programs of others, and wait for what is built beside them.
set -euo pipefail

limit=$1
shift
case $PWD/ in # go test runs a binary in its package's directory
*/integration/*) exec "$@" ;;
esac
exec "$@" "-test.timeout=$limit"
