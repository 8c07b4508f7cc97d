package problems

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProblems(t *testing.T) {
	var l List
	require.NoError(t, l.Err())
	l.Add("PORT", "is %d", 1)
	require.EqualError(t, l.Err(), "wrong configuration: PORT: is 1")
	l.AddError(errors.Join(errors.New("a"), errors.New("b")))
	require.EqualError(t, l.Err(), "wrong configuration, 3 errors:\n  PORT: is 1\n  a\n  b")
	var from List
	from.AddFrom("PORT", errors.Join(errors.New("a"), errors.New("b")))
	from.AddFrom("SIZE", errors.New("c"))
	require.EqualError(t, from.Err(),
		"wrong configuration, 3 errors:\n  PORT: a\n  PORT: b\n  SIZE: c")
	var wrong *Error
	require.ErrorAs(t, l.Err(), &wrong)
	require.Len(t, wrong.Unwrap(), 3)
}
