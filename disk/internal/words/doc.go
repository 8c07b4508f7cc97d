// Package words puts sizes and file names into messages for people.
package words
