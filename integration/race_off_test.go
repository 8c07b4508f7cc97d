//go:build !race

package integration

// raceEnabled says whether the tests run with the race detector. If so, the daemon is built with
// it, too.
const raceEnabled = false
