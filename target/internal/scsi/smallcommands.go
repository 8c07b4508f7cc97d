package scsi

// Bits of byte 4 of START STOP UNIT (SBC-3 5.20).
const (
	powerConditionMask = 0xf0
	bitNoFlush         = 0x04
	bitLOEJ            = 0x02
	bitStart           = 0x01
)

// onlyStarts reports whether a START STOP UNIT does no more than make the unit ready (SBC-3 4.17).
func onlyStarts(cdb *[16]byte) bool { return cdb[4]&(powerConditionMask|bitStart) == bitStart }

// prepareStartStop validates START STOP UNIT. There is no medium to load or to eject. With a power
// condition, START and LOEJ are ignored.
func prepareStartStop(t *Task) error {
	if request := t.CDB[4]; request&powerConditionMask == 0 && request&bitLOEJ != 0 {
		return invalidField(4, 1)
	}
	return nil
}

// finishStartStop is START STOP UNIT. There is no spindle and there are no power conditions, so
// nothing changes the unit. Stopping it flushes.
func finishStartStop(t *Task) (Status, error) {
	if t.CDB[4]&(powerConditionMask|bitStart|bitNoFlush) == 0 {
		return t.flush()
	}
	return StatusGood, nil
}

const bitDESC = 0x01

// prepareRequestSense is REQUEST SENSE (SPC-4 6.39). Each status carries its own sense data, so
// only unit attentions can be pending. It takes the one with the highest precedence.
func prepareRequestSense(t *Task) error {
	sense := &senseError{}
	if t.unit == nil {
		sense = errLUNNotSupported
	} else if pending := t.at.take(); pending != nil {
		sense = pending
	}
	t.data = sense.appendTo(t.data[:0], t.CDB[1]&bitDESC != 0)
	t.reply(uint32(t.CDB[4]))
	return nil
}
