// Package upload receives the content of a volume over HTTP.
//
// A server makes one Handler and mounts it below the name of a volume. PUT receives a raw disk or a
// qcow2 image, either plain or in gzip, zstd or xz, recognised by its content. With the header
// Upload-Complete an upload can be resumed, as draft-ietf-httpbis-resumable-upload-12 says: it then
// has an address of its own for HEAD, PATCH and DELETE.
//
//	handler.go   requests and answers
//	turn.go      which volume and which upload a request is about
//	receive.go   the content of a request
//	slots.go     one upload at a time for each volume, and which connection it is on
//	session.go   one upload: its data, how much of it is durable, how it ends
//	record.go    what a new process needs to resume an upload
//	fields.go    header fields: RFC 9651, RFC 9530, and those of the draft
//
// A raw disk is written in the place of the volume's disk, and its zeros become holes. A qcow2
// image is stored as it is. The volume's disk is put above it and served at once, and the file is
// removed when its content has been copied. Neither needs more space.
//
// Guarantees: the volume is served only when all data has come, has the right digest, is valid and
// is on storage. A failed upload leaves nothing behind. An upload takes less than 32 MiB of memory,
// even if storage is slow or the data claims more. After a kill of the process, a resumable upload
// of plain data goes on where it was. Any other upload must begin again.
package upload
