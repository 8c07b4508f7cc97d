// Package foreign reads disk images as other programs write them, such as VHDX. It reads only, so
// that they can be converted; they are not served.
//
//	im, err := foreign.Open(ctx, foreign.VHDX, file, size, foreign.Options{})
//	im.ReadAt(ctx, p, off)        // the disk
//	im.Run(ctx, off, length)      // what of it is stored, and where
//
// All of these formats cut the disk into blocks, and have a table that says where in the file each
// block lies. So there is one reader, and a parser for each format that finds the table.
//
// Images are not trusted. All of the table is checked when an image is opened: a block lies inside
// the file, not in the metadata, and not on another block. Nothing of the table is kept, so the
// memory of an open image does not depend on what it claims.
package foreign
