// Package layer reads and makes the layers of images with disks: archives, tables of contents, and
// the index of an image. The verbs of registry call it. It decides nothing about images, and keeps
// nothing.
//
// What it reads comes from strangers: sizes, counts and names are bounded before anything is made
// of them. Large lists of digests stay in files.
package layer

import v1 "github.com/google/go-containerregistry/pkg/v1"

type descriptor = v1.Descriptor
