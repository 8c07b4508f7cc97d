//go:build race

package target_test

// raceEnabled tells whether the tests run with the race detector; the daemon is then built with it,
// too.
const raceEnabled = true
