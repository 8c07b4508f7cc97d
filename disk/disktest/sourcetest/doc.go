// Package sourcetest has a source of an image that lies far away. It can be slow, unreachable for a
// while, or end for good. It is for tests only.
package sourcetest
