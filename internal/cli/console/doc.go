// Package console is what commands say to people: the log, the progress of a long operation, sizes,
// and names that others have chosen, made harmless.
package console
