// Package layer reads and makes the layers of images with disks: archives, tables of contents, and
// the index of an image. Package registry calls it. It decides nothing about images, and stores
// nothing.
//
// Its input comes from strangers: sizes, counts and names are bounded before they are used. Large
// lists of digests stay in files.
package layer

import v1 "github.com/google/go-containerregistry/pkg/v1"

type descriptor = v1.Descriptor
