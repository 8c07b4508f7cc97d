// gowidth lists the lines of Go files that are wider than 100 columns, and exits with 1 if there
// are any. A tab counts as 4 columns. Raw strings are data and may have any width. So may markers
// (comments that begin with +), which cannot be broken. It ignores generated files, because nobody
// reads them.
package main

import (
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"regexp"
	"strings"
)

const (
	maxColumns = 100
	tabColumns = 4
)

// generated matches the line that marks a generated file for the go command.
var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

func main() {
	found := false
	for _, path := range os.Args[1:] {
		src, err := os.ReadFile(path)
		if err != nil {
			fmt.Fprintln(os.Stderr, "gowidth:", err)
			os.Exit(2)
		}
		for _, line := range wide(src) {
			found = true
			fmt.Printf("%s:%d: the line is wider than %d columns\n", path, line, maxColumns)
		}
	}
	if found {
		os.Exit(1)
	}
}

// wide returns the numbers, from 1, of the lines that are too wide.
func wide(src []byte) []int {
	if generated.Match(src) {
		return nil
	}
	raw := rawLines(src)
	var found []int
	for i, line := range strings.Split(string(src), "\n") {
		marker := strings.HasPrefix(strings.TrimSpace(line), "// +")
		if !raw[i+1] && !marker && columns(line) > maxColumns {
			found = append(found, i+1)
		}
	}
	return found
}

func columns(line string) (n int) {
	for _, r := range line {
		if r == '\t' {
			n += tabColumns - n%tabColumns
		} else {
			n++
		}
	}
	return n
}

// rawLines are the lines that contain a part of a raw string.
func rawLines(src []byte) map[int]bool {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(src))
	var s scanner.Scanner
	s.Init(file, src, nil, 0)
	lines := make(map[int]bool)
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return lines
		}
		if tok != token.STRING || literal[0] != '`' {
			continue
		}
		first := file.Line(pos)
		for i := range strings.Count(literal, "\n") + 1 {
			lines[first+i] = true
		}
	}
}
