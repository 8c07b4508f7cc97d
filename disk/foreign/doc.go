// Package foreign reads disk images that other programs have written, such as VHDX. It only reads,
// to convert them; they are not served.
//
//	im, err := foreign.Open(ctx, foreign.VHDX, file, size, foreign.Options{})
//	im.ReadAt(ctx, p, off)        // the disk
//	im.Run(ctx, off, length)      // what of it is stored, and where
//
// All of these formats cut the disk into blocks, and have a table that says where each block lies
// in the file. So there is one reader, and for each format a parser that finds the table.
//
// Images are not trusted. The whole table is checked when an image is opened: each block must lie
// inside the file, outside of the metadata, and not on another block. The table is not kept in
// memory. So the memory of an open image does not depend on its claims.
package foreign
