//go:build !race

package target_test

// raceEnabled says whether the tests run with the race detector.
const raceEnabled = false
