// Package sourcetest is a source of an image that lies far away: it is slow, cannot be reached for a
// while, and comes back or does not. It is for tests only.
package sourcetest
