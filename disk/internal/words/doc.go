// Package words puts sizes and file names into messages for people. The packages of disks call it
// when they make an error or a line of the log. A file name comes out quoted, so that it is one
// word of one line whatever it contains.
package words
