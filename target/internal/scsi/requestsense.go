package scsi

const bitDESC = 0x01

// prepareRequestSense is REQUEST SENSE (SPC-4 6.39). Each status carries its own sense data, so
// only unit attentions can be pending. It takes the one with the highest precedence. If there is
// none, it reports the progress of a sanitize operation.
func prepareRequestSense(t *Task) error {
	sense := &senseError{}
	if t.unit == nil {
		sense = errLUNNotSupported
	} else if pending := t.at.take(); pending != nil {
		sense = pending
	} else if sanitizePhase(t.unit.sanitizing.phase.Load()) == sanitizeRunning {
		sense = t.unit.sanitizing.inProgress()
	}
	t.data = sense.appendTo(t.data[:0], t.CDB[1]&bitDESC != 0)
	t.reply(uint32(t.CDB[4]))
	return nil
}
