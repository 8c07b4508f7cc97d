// Package metrics counts what happens at disks in use, and shows it as Prometheus series.
//
// A daemon makes one Metrics and gives it to its disks in use as the Observer. It calls SetDisks
// and SetReady for what is not an event, and serves Handler as /metrics.
//
// Counting is on the request path: one SCSI command costs two map look-ups without a lock and four
// atomic additions. Peers choose some label values, so their number is bounded. Everything beyond
// the bound is counted together as "other".
//
//	kubevirt_disk_operations_total            lun initiator operation status
//	kubevirt_disk_operation_errors_total      lun initiator operation  of these, the failed ones
//	kubevirt_disk_transferred_bytes_total     lun initiator operation  between initiator and disk
//	kubevirt_disk_operation_duration_seconds  lun initiator operation  histogram
//	kubevirt_disk_sessions                    initiator type           in full feature phase, now
//	kubevirt_disk_logins_accepted_total       type
//	kubevirt_disk_logins_refused_total        reason
//	kubevirt_disk_sessions_ended_total        reason
//	kubevirt_disk_pdus_rejected_total         reason
//	kubevirt_disk_panics_caught_total
//	kubevirt_disk_lun_size_bytes              lun image  capacity
//	kubevirt_disk_lun_failed                  lun image  1: it failed for good
//	kubevirt_disk_lun_signed                  lun image key  1: the image is signed by the key
//	kubevirt_disk_image_copied_bytes          lun image  of the image's data
//	kubevirt_disk_image_data_bytes            lun image
//	kubevirt_disk_disk_complete               lun image  1: the disk no longer needs its image
//	kubevirt_disk_waits_for_space             lun image  1: copying has stopped until there is room
//	kubevirt_disk_lun_used_bytes              lun image  of the storage below
//	kubevirt_disk_lun_free_bytes              lun image  left on the storage below
//	kubevirt_disk_volumes{state}                 that were made on demand
//	kubevirt_disk_volumes_bytes                  of all of them
//	kubevirt_disk_uploads                        under way
//	kubevirt_disk_upload_bytes_total             received
//	kubevirt_disk_uploads_ended_total{result}    completed or failed
//	kubevirt_disk_registry_fetched_bytes_total   of images, from registries
//	kubevirt_disk_registry_fetched_chunks_total
//	kubevirt_disk_registry_wrong_chunks_total    not served, and fetched again
//	kubevirt_disk_cache_damaged_chunks_total     fetched again
//	kubevirt_disk_cache_unsaved_chunks_total     served, and not stored
//	kubevirt_disk_ready                       1: every LUN can be used
//	kubevirt_disk_build_info                  version commit goversion platform
package metrics
