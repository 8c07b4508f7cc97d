package testtool

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Must returns the value of a call that must not fail: text := Must(os.ReadFile(name))(t). What
// follows t says what failed, as in require.NoError.
func Must[T any](value T, err error) func(t testing.TB, says ...any) T {
	return func(t testing.TB, says ...any) T {
		t.Helper()
		require.NoError(t, err, says...)
		return value
	}
}

// Must2 is Must of a call with two values.
func Must2[T, U any](value T, second U, err error) func(t testing.TB, says ...any) (T, U) {
	return func(t testing.TB, says ...any) (T, U) {
		t.Helper()
		require.NoError(t, err, says...)
		return value, second
	}
}

// Err returns the error of a call whose value the test does not look at.
func Err[T any](_ T, err error) error { return err }

// Err2 is Err of a call with two values.
func Err2[T, U any](_ T, _ U, err error) error { return err }
