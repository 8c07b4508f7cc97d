// Package console has the output of commands for people: the log, the progress of a long operation,
// sizes, and untrusted names, made harmless.
package console
